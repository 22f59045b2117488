-- now, call, id, epoch, token, wake_at or '', waiting_for, entries, consume -> ok, lost, refused, or arrived and the rows
local now, call, id, epoch, token, wake_at, waiting_for = take_now(), take(), take(), take(), take(), take(), take()
local entries, consume = take_list(), take_list()
local row = columns_of(id, { 'call', 'cancel_requested', 'problem' })
if row.call == call then
  return { 'ok' }
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local refusal = write(id, entries, consume, {})
if refusal then
  return refusal
end

local awaited, waits = {}, unframe(waiting_for)
for i = 1, #waits, 2 do
  awaited[frame(waits[i], waits[i + 1])] = true
end
local arrived = {}
if next(awaited) then
  for _, stored in ipairs(redis.call('ZRANGE', key_of('inbox', id), 0, -1)) do
    if awaited[address_of(stored)] then
      arrived[#arrived + 1] = stored
    end
  end
end
if #arrived > 0 then
  return { 'arrived', arrived }
end

if row.cancel_requested == '1' and (wake_at == '' or tonumber(wake_at) > now) then
  wake_at = int(now)
end
release_lease(id, indexed_columns(id), clear_problem(row, {
  status = 'suspended', wake_at = wake_at ~= '' and wake_at or NONE, attempts = '0', updated_at = int(now),
  waiting_for = waiting_for ~= '' and waiting_for or NONE, call = call,
}))
publish_change()
return { 'ok' }
