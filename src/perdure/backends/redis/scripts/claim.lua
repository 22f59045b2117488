-- now, limit, ttl, token, owner, how many suspects or '', attempts of a suspect, workflows each with its version, whether queues
-- are given, queues
--   -> now, the next wake_at after now, whole runs, and the ids of runs that were passed over because they are damaged
--
-- Runs that may come due lie in one sorted set by wake_at for each (workflow, version, queue, priority, whether it has started,
-- limit key). A claim reads only groups that have due runs, and skips a group whose queue or limit key is full or whose rate is
-- spent: its cost does not depend on how many runs sleep, or wait behind a limit.
local now, limit, length, token, owner = take_now(), tonumber(take()), tonumber(take()), take(), take()
local suspects, suspect_attempts = tonumber(take()) or math.huge, tonumber(take())
local wanted, any_queue, queues = take_list(), take() == '', set_of(take_list())
local PAGE = 32

local workflows = {}
for i = 1, #wanted, 2 do
  workflows[frame(wanted[i], wanted[i + 1])] = true
end

local damaged = {}
local function reply(next_wake_at, ids)
  local runs = {}
  for n, id in ipairs(ids) do
    if redis.call('HGET', key_of('run', id), 'token') == token .. '-' .. n then
      runs[#runs + 1] = load_run(id)
    end
  end
  return { int(now), next_wake_at, runs, damaged }
end

local done = recall(token)
if done then
  local ids = unframe(done)
  return reply(table.remove(ids), ids)
end

local function is_wanted(parts)
  return workflows[frame(parts[1], parts[2])] and (any_queue or queues[parts[3]])
end

-- Whether the columns of the run are those by which it was found. To lease a run with others would leave it in this index for
-- ever, and claim it again and again.
local OPEN = { pending = true, running = true, suspended = true }
local function is_sound(group, row)
  return OPEN[row.status] and row.workflow and wake_group(row) == group.name
end

-- Whether the run's last holders were lost, and it recorded nothing with them.
local function is_suspect(id, row)
  return row.status == 'running' and number_in(columns_of(id, { 'attempts' }).attempts) >= suspect_attempts
end

local function before(a, b)
  if a.priority ~= b.priority then
    return a.priority > b.priority
  end
  if a.wake_at ~= b.wake_at then
    return a.wake_at < b.wake_at
  end
  return is_less(a.id, b.id)
end

-- A heap of groups. On top is the group whose next run comes first by priority, wake_at and id.
local heap = {}

local function sift_down(at)
  while true do
    local first = at
    for child = 2 * at, 2 * at + 1 do
      if heap[child] and before(heap[child], heap[first]) then
        first = child
      end
    end
    if first == at then
      return
    end
    heap[at], heap[first] = heap[first], heap[at]
    at = first
  end
end

-- Go on to the group's next due run. No run is changed before all are picked, so offsets stay valid.
local function advance(group)
  group.at = group.at + 2
  if group.at > #group.page then
    group.page = redis.call('ZRANGEBYSCORE', group.members, '-inf', int(now), 'WITHSCORES', 'LIMIT', group.offset, group.size)
    group.offset, group.at, group.size = group.offset + group.size, 1, PAGE
  end
  group.id, group.wake_at = group.page[group.at], tonumber(group.page[group.at + 1])
  return group.id
end

local next_wake_at = nil
local function note_wake_at(instant)
  if instant and (not next_wake_at or tonumber(instant) < next_wake_at) then
    next_wake_at = tonumber(instant)
  end
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', root .. ':wake', '-inf', int(now))) do
  local parts = unframe(name)
  if is_wanted(parts) then
    local group = { name = name, members = key_of('wake', name), queue = parts[3], limit_key = parts[6] }
    group.priority, group.is_start = tonumber(parts[4]), parts[5] == '0'
    group.offset, group.at, group.size, group.page = 0, 1, 1, {}
    advance(group)
    heap[#heap + 1] = group
    note_wake_at(redis.call('ZRANGEBYSCORE', group.members, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end
end
for at = math.floor(#heap / 2), 1, -1 do
  sift_down(at)
end

-- The first of the sleeping groups that the claim may take.
local offset, sleeping = 0, nil
repeat
  sleeping = redis.call('ZRANGEBYSCORE', root .. ':wake', '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', offset, PAGE)
  offset = offset + PAGE
  for i = 1, #sleeping, 2 do
    if is_wanted(unframe(sleeping[i])) then
      note_wake_at(sleeping[i + 1])
      sleeping = {}
      break
    end
  end
until #sleeping == 0

local picked = {}
while #picked < limit and heap[1] do
  local group = heap[1]
  local row = indexed_columns(group.id)
  local is_in = true
  if not is_sound(group, row) then
    damaged[#damaged + 1] = group.id
  elseif not is_suspect(group.id, row) then
    is_in = take_room(group.queue, group.limit_key, group.is_start, now)
    picked[#picked + 1] = is_in and group.id or nil
  elseif suspects > 0 then
    is_in = take_room(group.queue, group.limit_key, group.is_start, now)
    picked[#picked + 1] = is_in and group.id or nil
    suspects = suspects - (is_in and 1 or 0)
  end
  if not is_in or not advance(group) then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  sift_down(1)
end

note_wake_at(held_back_until)
for n, id in ipairs(picked) do
  lease_run(id, indexed_columns(id), token .. '-' .. n, owner, length, now)
end
local next_ = next_wake_at and int(next_wake_at) or ''
if #picked > 0 then
  local names = {}
  for n, id in ipairs(picked) do
    names[n] = frame(id)
  end
  remember(token, table.concat(names) .. frame(next_))
end
return reply(next_, picked)
