-- filter, without metadata -> how many runs
local filter = take_filter()

local number = 0
if filter.prefix ~= '' then
  for _, id in ipairs(ids_with_prefix(filter.prefix)) do
    local row = columns_of(id, { 'workflow', 'queue', 'status', 'updated_at' })
    local score = -number_in(row.updated_at)
    if has_names(filter, row) and score >= filter.newest and score <= filter.oldest then
      number = number + 1
    end
  end
else
  for _, group in ipairs(list_groups()) do
    if has_names(filter, group) then
      number = number + redis.call('ZCOUNT', group.key, bound(filter.newest), bound(filter.oldest))
    end
  end
end
return number
