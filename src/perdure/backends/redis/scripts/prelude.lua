-- What every script begins with. KEYS[1] is the namespace's root, `{stem:prefix}`: a hash tag, so that every key that is made
-- from it lies in the same slot. Runs that a script finds by itself (in claim, purge, or as a parent) have their keys made here;
-- those that the caller knows are declared besides.
--
-- A run is a hash `run` of its columns (a column that is absent is None), and beside it: `steps` (sorted set, score = seq),
-- `inbox` (sorted set of the unconsumed rows, score = seq), `consumed` (set of seqs), `dedupes` (hash: name and dedupe -> seq),
-- `items` (sorted set in byte order: stream, n, payload) and `streams` (hash: stream -> length).
--
-- Numbers are doubles in Lua, exact up to 2^53 microseconds (the year 2255). Columns that a script only passes on stay text.

local root = KEYS[1]
local NONE = {}
local ENDED = { completed = true, failed = true, cancelled = true, dead = true }
local PARTS = { 'run', 'steps', 'inbox', 'consumed', 'dedupes', 'items', 'streams' }
-- The columns by which runs are found.
local INDEXED = { 'workflow', 'status', 'queue', 'priority', 'limit_key', 'wake_at', 'held', 'updated_at', 'lease_until' }

local cursor = 0

local function take()
  cursor = cursor + 1
  return ARGV[cursor]
end

local function take_list()
  local list = {}
  for i = 1, tonumber(take()) do
    list[i] = take()
  end
  return list
end

local function take_now()
  local given = take()
  if given ~= '' then
    return tonumber(given)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function int(number)
  return string.format('%.0f', number)
end

-- By bytes: Lua compares text by the server's locale.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- By the number, then by the id, of a list whose members begin with both.
local function in_order(a, b)
  if a[1] ~= b[1] then
    return a[1] < b[1]
  end
  return less(a[2], b[2])
end

local function key(kind, name)
  return root .. ':' .. kind .. ':' .. name
end

local function framed(...)
  local parts = {}
  for i, text in ipairs({ ... }) do
    parts[i] = #text .. ':' .. text
  end
  return table.concat(parts)
end

local function unframed(text)
  local parts, at = {}, 1
  while at <= #text do
    local length, from = string.match(text, '^(%d+):()', at)
    at = from + tonumber(length)
    parts[#parts + 1] = string.sub(text, from, at - 1)
  end
  return parts
end

local function columns(id, names)
  local values = redis.call('HMGET', key('run', id), unpack(names))
  local row = {}
  for i, name in ipairs(names) do
    row[name] = values[i] or nil
  end
  return row
end

local function indexed(id)
  return columns(id, INDEXED)
end

-- The group in which a run may come due, or nil: runs that are alike to a claim, also in the limits that hold for them.
local function wake_group(row)
  if row.wake_at and row.held ~= '1' then
    return framed(row.workflow, row.queue, row.priority, row.limit_key)
  end
end

-- `wake` has for each group the instant at which its first run comes due, so that groups which sleep cost a claim nothing.
local function tell_first(group)
  local first = redis.call('ZRANGE', key('wake', group), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', root .. ':wake', first[2], group)
  else
    redis.call('ZREM', root .. ':wake', group)
  end
end

local function move_wake(id, from, to, wake_at)
  if from and from ~= to then
    redis.call('ZREM', key('wake', from), id)
    tell_first(from)
  end
  if to then
    redis.call('ZADD', key('wake', to), wake_at, id)
    tell_first(to)
  end
end

local function list_group(row)
  return row.status and framed(row.workflow, row.status)
end

local function move_list(id, from, to, updated_at)
  if from and from ~= to then
    redis.call('ZREM', key('list', from), id)
    if redis.call('EXISTS', key('list', from)) == 0 then
      redis.call('SREM', root .. ':list', from)
    end
  end
  -- Negative, so that the last changed comes first and ties are in the order of their ids.
  if to and redis.call('ZADD', key('list', to), int(-tonumber(updated_at)), id) == 1 then
    redis.call('SADD', root .. ':list', to)
  end
end

-- The sets in which the run's lease is counted.
local function lease_sets(row)
  if not row.lease_until then
    return {}
  end
  return { key('leased', row.queue), row.limit_key and key('leased_key', framed(row.queue, row.limit_key)) or nil }
end

-- Have the run found by the columns of `after` instead of those of `before`; either may be empty.
local function reindex(id, before, after)
  move_list(id, list_group(before), list_group(after), after.updated_at)
  move_wake(id, wake_group(before), wake_group(after), after.wake_at)
  for _, members in ipairs(lease_sets(before)) do
    redis.call('ZREM', members, id)
  end
  for _, members in ipairs(lease_sets(after)) do
    redis.call('ZADD', members, after.lease_until, id)
  end
end

local function store(id, changes)
  local run = key('run', id)
  for name, value in pairs(changes) do
    if value == NONE then
      redis.call('HDEL', run, name)
    else
      redis.call('HSET', run, name, value)
    end
  end
end

-- Change columns and the indexes with them. `row` has the indexed columns, and then those of the changed run.
local function change(id, row, changes)
  local before = {}
  for _, name in ipairs(INDEXED) do
    before[name] = row[name]
  end
  store(id, changes)
  for name, value in pairs(changes) do
    if value == NONE then
      row[name] = nil
    else
      row[name] = value
    end
  end
  reindex(id, before, row)
end

-- Give up the lease and stop waiting, in one change with `changes`.
local function free(id, row, changes)
  for _, name in ipairs({ 'token', 'lease_owner', 'lease_until', 'waiting_for' }) do
    changes[name] = changes[name] or NONE
  end
  change(id, row, changes)
end

local function leased(row, now)
  return row.lease_until and tonumber(row.lease_until) > now
end

local function due(row, now)
  return row.wake_at and tonumber(row.wake_at) <= now
end

-- Make it due, without losing its place in the line when it is due already.
local function wake(id, row, now)
  if not due(row, now) then
    change(id, row, { wake_at = int(now) })
  end
end

local function next_epoch(row, now)
  return int(math.max(tonumber(row.epoch or '0') + 1, now))
end

local function everything(id)
  return {
    redis.call('HGETALL', key('run', id)),
    redis.call('ZRANGE', key('steps', id), 0, -1),
    redis.call('ZRANGE', key('inbox', id), 0, -1),
    redis.call('HGETALL', key('streams', id)),
  }
end

-- Lease the run, whoever had it before, and count the attempt.
local function give(id, row, token, owner, length, now)
  local counted = columns(id, { 'epoch', 'attempts', 'claimed_length' })
  local journal = redis.call('ZCARD', key('steps', id))
  local grew = journal > tonumber(counted.claimed_length or '0')
  local until_ = int(now + length)
  change(id, row, {
    status = 'running', wake_at = until_, lease_until = until_, lease_owner = owner, token = token, waiting_for = NONE,
    epoch = next_epoch(counted, now), attempts = grew and '1' or int(tonumber(counted.attempts or '0') + 1),
    claimed_length = int(journal), updated_at = int(now),
  })
end

-- The run's indexed columns, if this lease is its current one. An expired lease that nobody took over still is.
local function fenced(id, epoch, token)
  local held = columns(id, { 'epoch', 'token' })
  return held.token == token and held.epoch == epoch
end

local function pulse(id)
  local told = columns(id, { 'inbox_seq', 'cancel_requested' })
  return { 'ok', told.inbox_seq or '0', told.cancel_requested or '0' }
end

local function place(stream, n)
  return framed(stream) .. string.format('%020.0f', n)
end

local function item_at(id, stream, n)
  local found = redis.call('ZRANGEBYLEX', key('items', id), '[' .. place(stream, n), '(' .. place(stream, n + 1), 'LIMIT', 0, 1)
  return found[1]
end

-- What keeps this from being recorded, or nil.
local function contradiction(id, entries, consume, items)
  local said = {}
  for i = 1, #entries, 2 do
    local seq, entry = entries[i], entries[i + 1]
    local there = said[seq] or redis.call('ZRANGEBYSCORE', key('steps', id), seq, seq)[1] or entry
    if there ~= entry then
      return { 'refused', 'something else is recorded under seq ' .. seq .. ' already' }
    end
    said[seq] = entry
  end
  for _, seq in ipairs(consume) do
    if redis.call('ZCOUNT', key('inbox', id), seq, seq) == 0 and redis.call('SISMEMBER', key('consumed', id), seq) == 0 then
      return { 'refused', 'its inbox has no row ' .. seq .. ' to consume' }
    end
  end
  local shown = {}
  for i = 1, #items, 3 do
    local stream, n = items[i], tonumber(items[i + 1])
    local item = place(stream, n) .. items[i + 2]
    local there = shown[place(stream, n)] or item_at(id, stream, n) or item
    if there ~= item then
      return { 'refused', 'another item ' .. items[i + 1] .. ' is in that stream already' }
    end
    shown[place(stream, n)] = item
  end
end

-- Everything or nothing; what is there already is left as it is. Gives what keeps it from being recorded, or nil.
local function write(id, entries, consume, items)
  local refusal = contradiction(id, entries, consume, items)
  if refusal then
    return refusal
  end
  for i = 1, #entries, 2 do
    redis.call('ZADD', key('steps', id), entries[i], entries[i + 1])
  end
  for _, seq in ipairs(consume) do
    if redis.call('ZREMRANGEBYSCORE', key('inbox', id), seq, seq) == 1 then
      redis.call('SADD', key('consumed', id), seq)
    end
  end
  for i = 1, #items, 3 do
    if redis.call('ZADD', key('items', id), 0, place(items[i], tonumber(items[i + 1])) .. items[i + 2]) == 1 then
      redis.call('HINCRBY', key('streams', id), items[i], 1)
    end
  end
end

-- An inbox row as it is stored. `dedupe` is nil or text.
local function inbox_row(seq, kind, name, dedupe, payload)
  return table.concat({ seq, kind, #name, dedupe and #dedupe or -1, name .. (dedupe or '') .. payload }, ':')
end

local function address_of(stored)
  local kind, length, from = string.match(stored, '^%d+:(%a+):(%d+):%-?%d+:()')
  return framed(kind, string.sub(stored, from, from + tonumber(length) - 1))
end

-- Append to the inbox and wake the run if it waits for just this.
local function deliver(id, kind, name, dedupe, payload, now)
  local seq = redis.call('HINCRBY', key('run', id), 'inbox_seq', 1)
  redis.call('ZADD', key('inbox', id), seq, inbox_row(seq, kind, name, dedupe, payload))
  if dedupe then
    redis.call('HSET', key('dedupes', id), framed(name, dedupe), seq)
  end
  local row = indexed(id)
  if row.status == 'suspended' then
    local waits = unframed(columns(id, { 'waiting_for' }).waiting_for or '')
    for i = 1, #waits, 2 do
      if waits[i] == kind and waits[i + 1] == name then
        wake(id, row, now)
        break
      end
    end
  end
  return seq
end

local function remove(id)
  local row = indexed(id)
  if not row.status then
    return
  end
  reindex(id, row, {})
  redis.call('ZREM', root .. ':ids', id)
  for _, part in ipairs(PARTS) do
    redis.call('UNLINK', key(part, id))
  end
end

-- Write a run that is not there. `pairs_` are its columns; entries and inbox are lists of score and row.
local function put(id, pairs_, entries, inbox, dedupes)
  for i = 1, #pairs_, 2 do
    redis.call('HSET', key('run', id), pairs_[i], pairs_[i + 1])
  end
  redis.call('ZADD', root .. ':ids', 0, id)
  for i = 1, #entries, 2 do
    redis.call('ZADD', key('steps', id), entries[i], entries[i + 1])
  end
  redis.call('HSET', key('run', id), 'claimed_length', #entries / 2)
  for i = 1, #inbox, 2 do
    redis.call('ZADD', key('inbox', id), inbox[i], inbox[i + 1])
  end
  if #inbox > 0 then
    redis.call('HSET', key('run', id), 'inbox_seq', inbox[#inbox - 1])
  end
  for i = 1, #dedupes, 2 do
    redis.call('HSET', key('dedupes', id), dedupes[i], dedupes[i + 1])
  end
  reindex(id, {}, indexed(id))
end

-- Tell those who watch that something may be due or has ended. Who may not publish still writes; the watchers poll then.
local function tell()
  redis.pcall('PUBLISH', root .. ':changed', '')
end

-- Keep for a while what a call did, under its own name: when its reply is lost and it comes again, it finds this. What takes a
-- lease needs no such mark: the token is one, or (`call` in the row) the name of the call that gave the lease up.
local function remember(call, text)
  redis.call('SET', key('call', call), text, 'PX', 60000)
end

local function recall(call)
  return redis.call('GET', key('call', call)) or nil
end

-- Every (workflow, status) that some run has, each as the key of its runs and both names.
local function listed()
  local found = {}
  for _, group in ipairs(redis.call('SMEMBERS', root .. ':list')) do
    found[#found + 1] = { key('list', group), unframed(group) }
  end
  return found
end

local function set_of(list)
  local set = {}
  for _, one in ipairs(list) do
    set[one] = true
  end
  return set
end
