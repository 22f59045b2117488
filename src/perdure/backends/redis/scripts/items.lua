-- id, stream, after, limit -> items as they are stored, without their stream
local id, stream, after, limit = take(), take(), tonumber(take()), tonumber(take())
local from = '[' .. item_prefix(stream, math.max(after + 1, 0))
local found = redis.call('ZRANGEBYLEX', key_of('items', id), from, '(' .. frame(stream) .. ':', 'LIMIT', 0, limit)
local items = {}
for n, item in ipairs(found) do
  items[n] = string.sub(item, #frame(stream) + 1)
end
return items
