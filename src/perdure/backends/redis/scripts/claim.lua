-- now, limit, ttl, token, owner, workflows, whether queues are given, queues -> the earliest instant after now, and whole runs
--
-- Runs that may come due lie in one sorted set by wake_at for each (workflow, queue, priority, limit key). Only groups in which
-- something is due are looked at, and of a group whose queue or key is full no run: the cost does not depend on how many runs
-- sleep, or wait behind a limit.
local now, limit, length, token, owner = take_now(), tonumber(take()), tonumber(take()), take(), take()
local workflows, any_queue, queues = set_of(take_list()), take() == '', set_of(take_list())
local PAGE = 32

local function reply(next_wake_at, ids)
  local runs = {}
  for n, id in ipairs(ids) do
    if redis.call('HGET', key('run', id), 'token') == token .. '-' .. n then
      runs[#runs + 1] = everything(id)
    end
  end
  return { next_wake_at, runs }
end

local done = recall(token)
if done then
  local ids = unframed(done)
  return reply(table.remove(ids), ids)
end

local limits = {}
local flat = redis.call('HGETALL', root .. ':limits')
for i = 1, #flat, 2 do
  local concurrency, key_concurrency = string.match(flat[i + 1], '^(%-?%d*):(%-?%d*)$')
  limits[flat[i]] = { tonumber(concurrency), tonumber(key_concurrency) }
end

local taken = {}
local function live(members)
  if not taken[members] then
    taken[members] = redis.call('ZCOUNT', members, '(' .. int(now), '+inf')
  end
  return taken[members]
end

-- The sets in which a lease of this group is counted, and how many each may have.
local function rooms(group)
  local limit_ = limits[group.queue] or {}
  local found = { { key('leased', group.queue), limit_[1] } }
  if group.limit_key then
    found[2] = { key('leased_key', framed(group.queue, group.limit_key)), limit_[2] }
  end
  return found
end

-- Count one more run in, unless that would be too many.
local function let_in(group)
  for _, room in ipairs(group.rooms) do
    if room[2] and live(room[1]) >= room[2] then
      return false
    end
  end
  for _, room in ipairs(group.rooms) do
    if limits[group.queue] then
      taken[room[1]] = live(room[1]) + 1
    end
  end
  return true
end

local function wanted(parts)
  return workflows[parts[1]] and (any_queue or queues[parts[2]])
end

local function before(a, b)
  if a.priority ~= b.priority then
    return a.priority > b.priority
  end
  if a.wake_at ~= b.wake_at then
    return a.wake_at < b.wake_at
  end
  return less(a.id, b.id)
end

-- A heap of groups: the one whose first run has its turn is on top.
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

-- Go on to the group's next due run. Nothing is changed before all are picked, so offsets stay good.
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
local function may_wake_at(instant)
  if instant and (not next_wake_at or tonumber(instant) < next_wake_at) then
    next_wake_at = tonumber(instant)
  end
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', root .. ':wake', '-inf', int(now))) do
  local parts = unframed(name)
  if wanted(parts) then
    local group = { members = key('wake', name), queue = parts[2], priority = tonumber(parts[3]), limit_key = parts[4] }
    group.offset, group.at, group.size, group.page = 0, 1, 1, {}
    group.rooms = rooms(group)
    advance(group)
    heap[#heap + 1] = group
    may_wake_at(redis.call('ZRANGEBYSCORE', group.members, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end
end
for at = math.floor(#heap / 2), 1, -1 do
  sift_down(at)
end

-- Of the groups that sleep, the first that is wanted.
local offset, sleeping = 0, nil
repeat
  sleeping = redis.call('ZRANGEBYSCORE', root .. ':wake', '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', offset, PAGE)
  offset = offset + PAGE
  for i = 1, #sleeping, 2 do
    if wanted(unframed(sleeping[i])) then
      may_wake_at(sleeping[i + 1])
      sleeping = {}
      break
    end
  end
until #sleeping == 0

local picked = {}
while #picked < limit and heap[1] do
  local group = heap[1]
  local is_in = let_in(group)
  if is_in then
    picked[#picked + 1] = group.id
  end
  if not is_in or not advance(group) then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  sift_down(1)
end

for n, id in ipairs(picked) do
  give(id, indexed(id), token .. '-' .. n, owner, length, now)
end
local next_ = next_wake_at and int(next_wake_at) or ''
if #picked > 0 then
  local names = {}
  for n, id in ipairs(picked) do
    names[n] = framed(id)
  end
  remember(token, table.concat(names) .. framed(next_))
end
return reply(next_, picked)
