-- now, call, id, epoch, token, wake_at or '', problem or '', whether the attempt counts -> ok or lost
local now, call, id, epoch, token = take_now(), take(), take(), take(), take()
local wake_at, problem, counts_attempt = take(), take(), take() == '1'
local row = columns_of(id, { 'call', 'attempts', 'problem', 'problem_count' })
if row.call == call then
  return { 'ok' }
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local attempts = number_in(row.attempts)
local changes = clear_problem(row, {
  status = 'pending', wake_at = wake_at ~= '' and wake_at or int(now), updated_at = int(now), call = call,
  attempts = int(counts_attempt and attempts or math.max(0, attempts - 1)),
})
if problem ~= '' then
  changes.problem, changes.problem_at = problem, int(now)
  changes.problem_count = int(number_in(row.problem_count) + 1)
end
release_lease(id, indexed_columns(id), changes)
publish_change()
return { 'ok' }
