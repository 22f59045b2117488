-- id, stream, after, limit -> items as they are stored, without their stream
local id, stream, after, limit = take(), take(), tonumber(take()), tonumber(take())
local from = '[' .. place(stream, math.max(after + 1, 0))
local found = redis.call('ZRANGEBYLEX', key('items', id), from, '(' .. framed(stream) .. ':', 'LIMIT', 0, limit)
local items = {}
for n, item in ipairs(found) do
  items[n] = string.sub(item, #framed(stream) + 1)
end
return items
