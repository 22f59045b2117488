-- now, call, id, name, payload, whether dedupe is given, dedupe -> ok and seq, missing or finished
local now, call, id, name, payload = take_now(), take(), take(), take(), take()
local has_dedupe, dedupe = take() == '1', take()
local done = recall(call)
if done then
  return { 'ok', done }
end
local status = columns_of(id, { 'status' }).status
if not status then
  return { 'missing' }
end
if has_dedupe then
  local first = redis.call('HGET', key_of('dedupes', id), frame(name, dedupe))
  if first then
    return { 'ok', first }
  end
end
if ENDED[status] then
  return { 'finished', status }
end
wake_from_problem(id, now)
local seq = int(deliver(id, 'signal', name, has_dedupe and dedupe or nil, payload, now))
remember(call, seq)
publish_change()
return { 'ok', seq }
