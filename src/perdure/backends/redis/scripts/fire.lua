-- now, call, schedule id, expected_at, next_at or '', run id or '' for none, columns -> ok or stale
local now, call, schedule, expected_at, next_at, id, columns = take_now(), take(), take(), take(), take(), take(), take_list()
local stored = redis.call('HGET', root .. ':schedules', schedule)
if recall(call) then
  return { 'ok' }
end
local at, rest = string.match(stored or '', '^(%-?%d*)(:.*)$')
if at ~= expected_at then
  return { 'stale' }
end
redis.call('HSET', root .. ':schedules', schedule, next_at .. rest)
if id ~= '' and redis.call('EXISTS', key_of('run', id)) == 0 then
  local start_at = int(now)
  for i = 1, #columns, 2 do
    if columns[i] == 'start_at' then
      start_at = columns[i + 1]
    end
  end
  for _, text in ipairs({ 'status', 'pending', 'wake_at', start_at, 'created_at', int(now), 'updated_at', int(now) }) do
    columns[#columns + 1] = text
  end
  insert_run(id, columns, {}, {}, {})
end
remember(call, '')
publish_change()
return { 'ok' }
