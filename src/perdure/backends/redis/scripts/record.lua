-- id, epoch, token, entries, consume, items -> a pulse, lost or refused. The run's row is read and never written.
local id, epoch, token = take(), take(), take()
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
return write(id, take_list(), take_list(), take_list()) or pulse(id)
