-- now, age, limit -> how many
local now, age, limit = take_now(), tonumber(take()), tonumber(take())
local old = {}
for _, group in ipairs(list_groups()) do
  if ENDED[group.status] then
    local page = redis.call('ZREVRANGEBYSCORE', group.key, '+inf', int(age - now), 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #page, 2 do
      old[#old + 1] = { -tonumber(page[i + 1]), page[i] }
    end
  end
end
table.sort(old, in_order)
local number = math.min(limit, #old)
for n = 1, number do
  delete_run(old[n][2])
end
return number
