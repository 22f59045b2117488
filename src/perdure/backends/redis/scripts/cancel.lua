-- now, call, id -> ok, missing or finished
local now, call, id = take_now(), take(), take()
if recall(call) then
  return { 'ok' }
end
local row = indexed_columns(id)
if not row.status then
  return { 'missing' }
end
if ENDED[row.status] then
  return { 'finished', row.status }
end
store_columns(id, { cancel_requested = '1' })
if not is_leased(row, now) and redis.call('HGET', key_of('run', id), 'input_hash') ~= '' then
  wake_run(id, row, now)
end
remember(call, '')
publish_change()
return { 'ok' }
