-- The prelude of every script. KEYS[1] is the namespace's root, `{stem:prefix}`: a hash tag, so every key that is made from it
-- lies in the same slot. The keys of runs that a script finds by itself (in claim, purge, or as a parent) are made here; the
-- caller declares the keys of the runs that it names.
--
-- A run is a hash `run` of its columns (a column that is absent is None), and beside it: `steps` (sorted set, score = seq),
-- `inbox` (sorted set of the unconsumed rows, score = seq), `consumed` (set of seqs), `dedupes` (hash: name and dedupe -> seq),
-- `items` (sorted set in byte order: stream, n, payload) and `streams` (hash: stream -> length).
--
-- Lua numbers are doubles, exact up to 2^53 microseconds (the year 2255). Columns that a script only passes on stay text.

local root = KEYS[1]
local NONE = {}
local ENDED = { completed = true, failed = true, cancelled = true, dead = true }
local PARTS = { 'run', 'steps', 'inbox', 'consumed', 'dedupes', 'items', 'streams' }
-- The columns by which runs are found.
local INDEXED = {
  'workflow', 'version', 'status', 'queue', 'priority', 'limit_key', 'wake_at', 'held', 'updated_at', 'lease_until', 'epoch',
}

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
  local text = take()
  if text ~= '' then
    return tonumber(text)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function int(number)
  return string.format('%.0f', number)
end

-- The number in a column; 0 for one that is absent or damaged, since an error in a script leaves half of its writes done.
local function number_in(text)
  return tonumber(text or '0') or 0
end

-- Compares bytes: Lua compares text by the server's locale.
local function is_less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- Sorts by number, then by id. Each member of the list begins with both.
local function in_order(a, b)
  if a[1] ~= b[1] then
    return a[1] < b[1]
  end
  return is_less(a[2], b[2])
end

local function key_of(kind, name)
  return root .. ':' .. kind .. ':' .. name
end

local function frame(...)
  local parts = {}
  for i, text in ipairs({ ... }) do
    parts[i] = #text .. ':' .. text
  end
  return table.concat(parts)
end

local function unframe(text)
  local parts, at = {}, 1
  while at <= #text do
    local length, from = string.match(text, '^(%d+):()', at)
    at = from + tonumber(length)
    parts[#parts + 1] = string.sub(text, from, at - 1)
  end
  return parts
end

local function columns_of(id, names)
  local values = redis.call('HMGET', key_of('run', id), unpack(names))
  local row = {}
  for i, name in ipairs(names) do
    row[name] = values[i] or nil
  end
  return row
end

local function indexed_columns(id)
  return columns_of(id, INDEXED)
end

-- Whether the run was ever leased: its epoch is absent or 0 until then.
local function has_started(row)
  return (row.epoch or '0') ~= '0'
end

-- The group in which the run comes due, or nil. To a claim all runs of a group are alike: the same filter and limits hold.
-- Runs that were never leased, whose next lease spends the rate of their queue, have groups of their own.
local function wake_group(row)
  if row.wake_at and row.held ~= '1' then
    return frame(row.workflow, row.version, row.queue, row.priority, has_started(row) and '1' or '0', row.limit_key)
  end
end

-- The sorted set `wake` has for each group the instant at which its first run comes due, so a claim skips sleeping groups.
local function update_first_wake(group)
  local first = redis.call('ZRANGE', key_of('wake', group), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', root .. ':wake', first[2], group)
  else
    redis.call('ZREM', root .. ':wake', group)
  end
end

local function move_wake(id, from, to, wake_at)
  if from and from ~= to then
    redis.call('ZREM', key_of('wake', from), id)
    update_first_wake(from)
  end
  if to then
    redis.call('ZADD', key_of('wake', to), wake_at, id)
    update_first_wake(to)
  end
end

local function list_group(row)
  return row.status and frame(row.workflow, row.queue, row.status)
end

local function move_list(id, from, to, updated_at)
  if from and from ~= to then
    redis.call('ZREM', key_of('list', from), id)
    if redis.call('EXISTS', key_of('list', from)) == 0 then
      redis.call('SREM', root .. ':list', from)
    end
  end
  -- Negative, so that the last changed comes first and ties are in the order of their ids.
  if to and redis.call('ZADD', key_of('list', to), int(-tonumber(updated_at)), id) == 1 then
    redis.call('SADD', root .. ':list', to)
  end
end

-- The sets that count the run's lease.
local function lease_sets(row)
  if not row.lease_until then
    return {}
  end
  return { key_of('leased', row.queue), row.limit_key and key_of('leased_key', frame(row.queue, row.limit_key)) or nil }
end

-- Move the run in all indexes from the columns of `before` to those of `after`. Either may be empty.
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

local function store_columns(id, changes)
  local run = key_of('run', id)
  for name, value in pairs(changes) do
    if value == NONE then
      redis.call('HDEL', run, name)
    else
      redis.call('HSET', run, name, value)
    end
  end
end

-- Change columns and the indexes with them. `row` has the indexed columns, and afterwards those of the changed run.
local function change_run(id, row, changes)
  local before = {}
  for _, name in ipairs(INDEXED) do
    before[name] = row[name]
  end
  store_columns(id, changes)
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
local function release_lease(id, row, changes)
  for _, name in ipairs({ 'token', 'lease_owner', 'lease_until', 'running_steps', 'waiting_for' }) do
    changes[name] = changes[name] or NONE
  end
  change_run(id, row, changes)
end

-- The changes; if the run's `row` has a problem they clear it.
local function clear_problem(row, changes)
  if row.problem then
    changes.problem, changes.problem_at, changes.problem_count = NONE, NONE, NONE
  end
  return changes
end

local function is_leased(row, now)
  return row.lease_until and tonumber(row.lease_until) > now
end

local function is_due(row, now)
  return row.wake_at and tonumber(row.wake_at) <= now
end

-- Make the run due. A run that is due already keeps its place in the order.
local function wake_run(id, row, now)
  if not is_due(row, now) then
    change_run(id, row, { wake_at = int(now) })
  end
end

-- Make a pending run with a problem due at once: an additional try is harmless.
local function wake_from_problem(id, now)
  local row = indexed_columns(id)
  if row.status == 'pending' and columns_of(id, { 'problem' }).problem then
    wake_run(id, row, now)
  end
end

local function next_epoch(row, now)
  return int(math.max(number_in(row.epoch) + 1, now))
end

local function load_run(id)
  return {
    redis.call('HGETALL', key_of('run', id)),
    redis.call('ZRANGE', key_of('steps', id), 0, -1),
    redis.call('ZRANGE', key_of('inbox', id), 0, -1),
    redis.call('HGETALL', key_of('streams', id)),
  }
end

-- Lease the run, whether or not it was leased before, and count the attempt.
local function lease_run(id, row, token, owner, length, now)
  local counted = columns_of(id, { 'epoch', 'attempts', 'claimed_length' })
  local journal = redis.call('ZCARD', key_of('steps', id))
  local grew = journal > number_in(counted.claimed_length)
  local until_ = int(now + length)
  change_run(id, row, {
    status = 'running', wake_at = until_, lease_until = until_, lease_owner = owner, token = token, waiting_for = NONE,
    epoch = next_epoch(counted, now), attempts = grew and '1' or int(number_in(counted.attempts) + 1),
    claimed_length = int(journal), updated_at = int(now), running_steps = NONE,
  })
end

-- What the limits of queues let in: read once for each queue, and counted on as this script leases runs. `leased` has for each
-- queue its runs by the end of their lease, `leased_key` for each limit key, and the hash `starts` the last start of each queue.
local limits_by_queue, lease_counts = {}, {}
-- The instant at which the rate of a queue lets the first run start that it held back, or nil.
local held_back_until = nil

local function limits_of(queue)
  if not limits_by_queue[queue] then
    local stored = redis.call('HGET', root .. ':limits', queue) or ''
    local concurrency, per_key, interval = string.match(stored, '^(%d*):(%d*):(%d*)$')
    local found = { concurrency = tonumber(concurrency), per_key = tonumber(per_key), interval = tonumber(interval) }
    if found.interval then
      found.last_start = tonumber(redis.call('HGET', root .. ':starts', queue) or '')
    end
    limits_by_queue[queue] = found
  end
  return limits_by_queue[queue]
end

local function has_room(members, most, now)
  if not most then
    return true
  end
  lease_counts[members] = lease_counts[members] or redis.call('ZCOUNT', members, '(' .. int(now), '+inf')
  return lease_counts[members] < most
end

-- Count one more run and, if it `is_start`, spend the rate, unless the limits of its queue forbid it; whether it was counted.
local function take_room(queue, limit_key, is_start, now)
  local limits = limits_of(queue)
  local of_queue, of_key = key_of('leased', queue), limit_key and key_of('leased_key', frame(queue, limit_key))
  if not has_room(of_queue, limits.concurrency, now) or (of_key and not has_room(of_key, limits.per_key, now)) then
    return false
  end
  if is_start and limits.interval then
    local next_start = limits.last_start and limits.last_start + limits.interval
    if next_start and now < next_start then
      held_back_until = math.min(held_back_until or next_start, next_start)
      return false
    end
    limits.last_start = now
    redis.call('HSET', root .. ':starts', queue, int(now))
  end
  for _, members in ipairs({ of_queue, of_key }) do
    lease_counts[members] = lease_counts[members] and lease_counts[members] + 1
  end
  return true
end

-- Whether this lease is the run's current one. An expired lease that was not taken over is still current.
local function is_fenced(id, epoch, token)
  local held = columns_of(id, { 'epoch', 'token' })
  return held.token == token and held.epoch == epoch
end

local function pulse(id)
  local row = columns_of(id, { 'inbox_seq', 'cancel_requested' })
  return { 'ok', row.inbox_seq or '0', row.cancel_requested or '0' }
end

local function item_prefix(stream, n)
  return frame(stream) .. string.format('%020.0f', n)
end

local function item_at(id, stream, n)
  local from, to = '[' .. item_prefix(stream, n), '(' .. item_prefix(stream, n + 1)
  local found = redis.call('ZRANGEBYLEX', key_of('items', id), from, to, 'LIMIT', 0, 1)
  return found[1]
end

-- The refusal of a record that contradicts what is there, or nil. Nothing in the record itself is there twice.
local function contradiction(id, entries, consume, items)
  for i = 1, #entries, 2 do
    local seq, entry = entries[i], entries[i + 1]
    if (redis.call('ZRANGEBYSCORE', key_of('steps', id), seq, seq)[1] or entry) ~= entry then
      return { 'refused', 'entry ' .. seq }
    end
  end
  for _, seq in ipairs(consume) do
    if redis.call('ZCOUNT', key_of('inbox', id), seq, seq) == 0 and redis.call('SISMEMBER', key_of('consumed', id), seq) == 0 then
      return { 'refused', 'inbox ' .. seq }
    end
  end
  for i = 1, #items, 3 do
    local stream, n = items[i], tonumber(items[i + 1])
    local item = item_prefix(stream, n) .. items[i + 2]
    if (item_at(id, stream, n) or item) ~= item then
      return { 'refused', 'item ' .. items[i + 1] .. ' ' .. stream }
    end
  end
end

-- Record all of it or nothing. What is there already and equal is left alone. Returns the refusal, or nil.
local function write(id, entries, consume, items)
  local refusal = contradiction(id, entries, consume, items)
  if refusal then
    return refusal
  end
  for i = 1, #entries, 2 do
    redis.call('ZADD', key_of('steps', id), entries[i], entries[i + 1])
  end
  for _, seq in ipairs(consume) do
    if redis.call('ZREMRANGEBYSCORE', key_of('inbox', id), seq, seq) == 1 then
      redis.call('SADD', key_of('consumed', id), seq)
    end
  end
  for i = 1, #items, 3 do
    if redis.call('ZADD', key_of('items', id), 0, item_prefix(items[i], tonumber(items[i + 1])) .. items[i + 2]) == 1 then
      redis.call('HINCRBY', key_of('streams', id), items[i], 1)
    end
  end
end

-- An inbox row as it is stored. `dedupe` is nil or text.
local function inbox_row(seq, kind, name, dedupe, payload)
  return table.concat({ seq, kind, #name, dedupe and #dedupe or -1, name .. (dedupe or '') .. payload }, ':')
end

local function address_of(stored)
  local kind, length, from = string.match(stored, '^%d+:(%a+):(%d+):%-?%d+:()')
  return frame(kind, string.sub(stored, from, from + tonumber(length) - 1))
end

-- Append to the inbox, and wake the run if it waits for this kind and name.
local function deliver(id, kind, name, dedupe, payload, now)
  local seq = redis.call('HINCRBY', key_of('run', id), 'inbox_seq', 1)
  redis.call('ZADD', key_of('inbox', id), seq, inbox_row(seq, kind, name, dedupe, payload))
  if dedupe then
    redis.call('HSET', key_of('dedupes', id), frame(name, dedupe), seq)
  end
  local row = indexed_columns(id)
  if row.status == 'suspended' then
    local waits = unframe(columns_of(id, { 'waiting_for' }).waiting_for or '')
    for i = 1, #waits, 2 do
      if waits[i] == kind and waits[i + 1] == name then
        wake_run(id, row, now)
        break
      end
    end
  end
  return seq
end

local function delete_run(id)
  local row = indexed_columns(id)
  if not row.status then
    return
  end
  reindex(id, row, {})
  redis.call('ZREM', root .. ':ids', id)
  for _, part in ipairs(PARTS) do
    redis.call('UNLINK', key_of(part, id))
  end
end

-- Write a run that does not exist. `pairs_` are its columns; entries and inbox are lists of score and row.
local function insert_run(id, pairs_, entries, inbox, dedupes)
  for i = 1, #pairs_, 2 do
    redis.call('HSET', key_of('run', id), pairs_[i], pairs_[i + 1])
  end
  redis.call('ZADD', root .. ':ids', 0, id)
  for i = 1, #entries, 2 do
    redis.call('ZADD', key_of('steps', id), entries[i], entries[i + 1])
  end
  redis.call('HSET', key_of('run', id), 'claimed_length', #entries / 2)
  for i = 1, #inbox, 2 do
    redis.call('ZADD', key_of('inbox', id), inbox[i], inbox[i + 1])
  end
  if #inbox > 0 then
    redis.call('HSET', key_of('run', id), 'inbox_seq', inbox[#inbox - 1])
  end
  for i = 1, #dedupes, 2 do
    redis.call('HSET', key_of('dedupes', id), dedupes[i], dedupes[i + 1])
  end
  reindex(id, {}, indexed_columns(id))
end

-- Publish that a run may be due or has ended, or has new `items`. A user without the right to publish can still write; the
-- watchers poll then.
local function publish_change(what)
  redis.pcall('PUBLISH', root .. ':changed', what or '')
end

-- Keep for a minute what a call did, under the call's token: when its reply is lost and the call is sent again, it finds this.
-- A verb that takes or gives up a lease needs no such mark: the lease's token is one, or the column `call` of the run.
local function remember(call, text)
  redis.call('SET', key_of('call', call), text, 'PX', 60000)
end

local function recall(call)
  return redis.call('GET', key_of('call', call)) or nil
end

local function set_of(list)
  local set = {}
  for _, one in ipairs(list) do
    set[one] = true
  end
  return set
end

-- Every (workflow, queue, status) that has runs, by these names, and the key of its runs.
local function list_groups()
  local found = {}
  for _, group in ipairs(redis.call('SMEMBERS', root .. ':list')) do
    local names = unframe(group)
    found[#found + 1] = { key = key_of('list', group), workflow = names[1], queue = names[2], status = names[3] }
  end
  return found
end

-- Which runs a list is asked for: prefix, statuses or none, whether workflow is given, workflow, queue or '', updated_after or '',
-- updated_before or '', what the metadata contain or ''. `newest` and `oldest` are the scores between which they lie.
local function take_filter()
  local filter = { prefix = take(), statuses = take_list(), has_workflow = take() == '1', workflow = take(), queue = take() }
  local updated_after, updated_before = tonumber(take()), tonumber(take())
  filter.metadata = take()
  filter.is_status = set_of(filter.statuses)
  filter.newest = updated_before and 1 - updated_before or -math.huge
  filter.oldest = updated_after and -updated_after or math.huge
  return filter
end

-- Whether a run, or a group of runs, has the names that are asked for.
local function has_names(filter, row)
  return (#filter.statuses == 0 or filter.is_status[row.status])
    and (not filter.has_workflow or row.workflow == filter.workflow)
    and (filter.queue == '' or row.queue == filter.queue)
end

-- A score as a bound of a range.
local function bound(score)
  if score == math.huge then
    return '+inf'
  end
  return score == -math.huge and '-inf' or int(score)
end

local function ids_with_prefix(prefix)
  return redis.call('ZRANGEBYLEX', root .. ':ids', '[' .. prefix, '(' .. prefix .. '\255')
end
