-- now, limit -> ids
local now, limit = take_now(), tonumber(take())
local found = {}
for _, group in ipairs(redis.call('ZRANGEBYSCORE', root .. ':wake', '-inf', int(now))) do
  local page = redis.call('ZRANGEBYSCORE', key_of('wake', group), '-inf', int(now), 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #page, 2 do
    found[#found + 1] = { tonumber(page[i + 1]), page[i] }
  end
end
table.sort(found, in_order)
local ids = {}
for n = 1, math.min(limit, #found) do
  ids[n] = found[n][2]
end
return ids
