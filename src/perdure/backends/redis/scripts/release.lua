-- now, call, id, epoch, token -> ok or lost
local now, call, id, epoch, token = take_now(), take(), take(), take(), take()
local row = columns_of(id, { 'call', 'attempts' })
if row.call == call then
  return { 'ok' }
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local attempts = math.max(0, tonumber(row.attempts or '0') - 1)
release_lease(id, indexed_columns(id), {
  status = 'pending', wake_at = int(now), attempts = int(attempts), updated_at = int(now), call = call,
})
publish_change()
return { 'ok' }
