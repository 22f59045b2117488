-- filter, before: updated_at or '' and id, limit, names of columns, length of an outcome's beginning
--   -> how many runs were looked at, updated_at and id of the last one, and a line for each whose metadata may match: its columns,
--      and the beginning of its outcome if it failed; a column that is absent is nil
--
-- Runs lie in one sorted set by updated_at for each (workflow, queue, status), last changed first. With a prefix, all runs that
-- have it are read and sorted.
local filter = take_filter()
local before_at, before_id, limit = tonumber(take()), take(), tonumber(take())
local columns, outcome_start = take_list(), tonumber(take())
local newest = before_at and math.max(-before_at, filter.newest) or filter.newest
local PAGE = 64

local function is_later(score, id)
  return not before_at or score > -before_at or (score == -before_at and is_less(before_id, id))
end

local found = {}
if filter.prefix ~= '' then
  for _, id in ipairs(ids_with_prefix(filter.prefix)) do
    local row = columns_of(id, { 'workflow', 'queue', 'status', 'updated_at' })
    local score = -number_in(row.updated_at)
    if has_names(filter, row) and score >= newest and score <= filter.oldest and is_later(score, id) then
      found[#found + 1] = { score, id }
    end
  end
else
  for _, group in ipairs(list_groups()) do
    local offset, seen = 0, 0
    while has_names(filter, group) and seen < limit do
      local page = redis.call(
        'ZRANGEBYSCORE', group.key, bound(newest), bound(filter.oldest), 'WITHSCORES', 'LIMIT', offset, PAGE)
      for i = 1, #page, 2 do
        if is_later(tonumber(page[i + 1]), page[i]) then
          found[#found + 1] = { tonumber(page[i + 1]), page[i] }
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

local function line_of(id)
  local row = columns_of(id, columns)
  local line = {}
  for i, name in ipairs(columns) do
    line[i] = row[name] or false
  end
  local has_error = row.status == 'failed' or row.status == 'dead'
  local outcome = has_error and redis.call('HGET', key_of('run', id), 'outcome')
  line[#line + 1] = outcome and string.sub(outcome, 1, outcome_start) or false
  return line
end

table.sort(found, in_order)
local number = math.min(limit, #found)
local lines = {}
for n = 1, number do
  local id = found[n][2]
  local may_match = true
  if filter.metadata ~= '' then
    may_match = string.find(columns_of(id, { 'metadata' }).metadata or '', filter.metadata, 1, true)
  end
  if may_match then
    lines[#lines + 1] = line_of(id)
  end
end
local last = found[number] or { 0, '' }
return { number, int(-last[1]), last[2], lines }
