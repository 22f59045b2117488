-- id, epoch, token, entries, consume, items -> a pulse, lost or refused. The run's row is read and never written.
local id, epoch, token = take(), take(), take()
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local entries, consume, items = take_list(), take_list(), take_list()
local refusal = write(id, entries, consume, items)
if not refusal and #items > 0 then
  publish_change('items')
end
return refusal or pulse(id)
