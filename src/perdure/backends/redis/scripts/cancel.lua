-- now, call, id -> ok, missing or finished
local now, call, id = take_now(), take(), take()
if recall(call) then
  return { 'ok' }
end
local row = indexed(id)
if not row.status then
  return { 'missing' }
end
if ENDED[row.status] then
  return { 'finished', row.status }
end
store(id, { cancel_requested = '1' })
if not leased(row, now) and redis.call('HGET', key('run', id), 'input_hash') ~= '' then
  wake(id, row, now)
end
remember(call, '')
tell()
return { 'ok' }
