-- call, id
local call, id = take(), take()
if not recall(call) then
  delete_run(id)
  remember(call, '')
  publish_change()
end
return { 'ok' }
