-- now, age, limit -> how many
local now, age, limit = take_now(), tonumber(take()), tonumber(take())
local old = {}
for _, group in ipairs(list_groups()) do
  if ENDED[group[2][2]] then
    local page = redis.call('ZREVRANGEBYSCORE', group[1], '+inf', int(age - now), 'WITHSCORES', 'LIMIT', 0, limit)
    -- The page has runs of one instant by descending id, and the limit may cut among those: they are read again, ascending.
    local last = page[#page]
    for i = 1, #page, 2 do
      if page[i + 1] ~= last then
        old[#old + 1] = { -tonumber(page[i + 1]), page[i] }
      end
    end
    for _, id in ipairs(last and redis.call('ZRANGEBYSCORE', group[1], last, last, 'LIMIT', 0, limit) or {}) do
      old[#old + 1] = { -tonumber(last), id }
    end
  end
end
table.sort(old, in_order)
local number = math.min(limit, #old)
for n = 1, number do
  delete_run(old[n][2])
end
return number
