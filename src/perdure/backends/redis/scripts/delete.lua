-- call, id
local call, id = take(), take()
if not recall(call) then
  remove(id)
  remember(call, '')
  tell()
end
return { 'ok' }
