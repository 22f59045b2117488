-- id, epoch, token, progress -> ok or lost
local id, epoch, token, progress = take(), take(), take(), take()
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
store_columns(id, { progress = progress })
return { 'ok' }
