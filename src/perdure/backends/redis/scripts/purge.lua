-- now, age, limit, statuses, whether workflow is given, workflow -> how many
local now, age, limit = take_now(), tonumber(take()), tonumber(take())
local statuses, has_workflow, workflow = set_of(take_list()), take() == '1', take()
local PAGE = 256

local function has_live_parent(id)
  local parent = columns_of(id, { 'parent_id' }).parent_id
  local status = parent and columns_of(parent, { 'status' }).status
  return status and not ENDED[status]
end

-- Add the oldest runs of this group to `old`: `limit` of them, and all of the last one's instant. Those come by descending id.
local function find_old(group, old)
  local offset, found, last = 0, 0, nil
  while true do
    local page = redis.call('ZREVRANGEBYSCORE', group, '+inf', int(age - now), 'WITHSCORES', 'LIMIT', offset, PAGE)
    for i = 1, #page, 2 do
      if found >= limit and page[i + 1] ~= last then
        return
      end
      if not has_live_parent(page[i]) then
        old[#old + 1] = { -tonumber(page[i + 1]), page[i] }
        found, last = found + 1, page[i + 1]
      end
    end
    if #page < 2 * PAGE then
      return
    end
    offset = offset + PAGE
  end
end

local old = {}
for _, group in ipairs(list_groups()) do
  if statuses[group.status] and (not has_workflow or group.workflow == workflow) then
    find_old(group.key, old)
  end
end
table.sort(old, in_order)
local number = math.min(limit, #old)
for n = 1, number do
  delete_run(old[n][2])
end
return number
