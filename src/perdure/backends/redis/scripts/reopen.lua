-- now, call, id, the rest of the drop entry -> ok, missing, finished or driven
local now, call, id, rest = take_now(), take(), take(), take()
if recall(call) then
  return { 'ok' }
end
local row = columns_of(id, { 'status', 'epoch', 'input_hash', 'problem' })
if not row.status then
  return { 'missing' }
end
if row.status == 'completed' then
  return { 'finished', row.status }
end
if not ENDED[row.status] then
  return { 'driven', row.status }
end
local epoch = next_epoch(row, now)
local last = redis.call('ZREVRANGE', key_of('steps', id), 0, 0, 'WITHSCORES')[2] or '0'
local seq = int(tonumber(last) + 1)
redis.call('ZADD', key_of('steps', id), seq, table.concat({ seq, epoch, int(now), int(now), rest }, ':'))
release_lease(id, indexed_columns(id), clear_problem(row, {
  status = 'pending', wake_at = row.input_hash ~= '' and int(now) or NONE, epoch = epoch, attempts = '0', updated_at = int(now),
  outcome = NONE, cancel_requested = NONE, parent_notified = NONE,
}))
remember(call, '')
publish_change()
return { 'ok' }
