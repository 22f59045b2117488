-- prefix, status or '', whether workflow is given, workflow, before: updated_at or '' and id, limit
--   -> id, workflow, status, updated_at, version and problem or '' of each run
--
-- Runs lie in one sorted set by updated_at for each (workflow, status), last changed first. With a prefix, all runs that have it
-- are read and sorted.
local prefix, status, has_workflow, workflow = take(), take(), take() == '1', take()
local before_at, before_id, limit = tonumber(take()), take(), tonumber(take())
local PAGE = 64

local function matches(workflow_, status_)
  return (status == '' or status_ == status) and (not has_workflow or workflow_ == workflow)
end

local function is_later(score, id)
  return not before_at or score > -before_at or (score == -before_at and is_less(before_id, id))
end

local found = {}
if prefix ~= '' then
  for _, id in ipairs(redis.call('ZRANGEBYLEX', root .. ':ids', '[' .. prefix, '(' .. prefix .. '\255')) do
    local row = columns_of(id, { 'workflow', 'status', 'updated_at' })
    local score = -number_in(row.updated_at)
    if matches(row.workflow, row.status) and is_later(score, id) then
      found[#found + 1] = { score, id, row.workflow, row.status }
    end
  end
else
  for _, group in ipairs(list_groups()) do
    local workflow_, status_ = group[2][1], group[2][2]
    local offset, seen = 0, 0
    while matches(workflow_, status_) and seen < limit do
      local from = before_at and int(-before_at) or '-inf'
      local page = redis.call('ZRANGEBYSCORE', group[1], from, '+inf', 'WITHSCORES', 'LIMIT', offset, PAGE)
      for i = 1, #page, 2 do
        if is_later(tonumber(page[i + 1]), page[i]) then
          found[#found + 1] = { tonumber(page[i + 1]), page[i], workflow_, status_ }
          seen = seen + 1
        end
      end
      if #page < 2 * PAGE then
        break
      end
      offset = offset + PAGE
    end
  end
end

table.sort(found, in_order)
local lines = {}
for n = 1, math.min(limit, #found) do
  local row = columns_of(found[n][2], { 'version', 'problem' })
  lines[n] = { found[n][2], found[n][3], found[n][4], int(-found[n][1]), row.version, row.problem or '' }
end
return lines
