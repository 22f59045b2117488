-- id, epoch, token, progress -> ok or lost
local id, epoch, token, progress = take(), take(), take(), take()
if not fenced(id, epoch, token) then
  return { 'lost' }
end
store(id, { progress = progress })
return { 'ok' }
