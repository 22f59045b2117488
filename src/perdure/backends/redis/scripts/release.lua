-- now, call, id, epoch, token, wake_at or '', problem or '', whether the attempt counts -> ok or lost
local now, call, id, epoch, token = take_now(), take(), take(), take(), take()
local wake_at, problem, counts_attempt = take(), take(), take() == '1'
local row = columns_of(id, { 'call', 'attempts', 'problem_count' })
if row.call == call then
  return { 'ok' }
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
local attempts, has_problem = tonumber(row.attempts or '0'), problem ~= ''
release_lease(id, indexed_columns(id), without_problem({
  status = 'pending', wake_at = wake_at ~= '' and wake_at or int(now), updated_at = int(now), call = call,
  attempts = int(counts_attempt and attempts or math.max(0, attempts - 1)),
  problem = has_problem and problem or nil, problem_at = has_problem and int(now) or nil,
  problem_count = has_problem and int(tonumber(row.problem_count or '0') + 1) or nil,
}))
publish_change()
return { 'ok' }
