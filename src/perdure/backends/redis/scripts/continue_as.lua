-- now, call, id, epoch, token, input, its hash, seed, definition hash or '', deadline or '' -> ok or lost
local now, call, id, epoch, token = take_now(), take(), take(), take(), take()
local input, input_hash, seed, definition_hash, deadline = take(), take(), take(), take(), take()
local row = columns_of(id, { 'seed', 'input_hash', 'first_input_hash', 'generation', 'problem' })
if row.seed == seed then
  return { 'ok' } -- the reply to this call was lost, and it was sent again
end
if not is_fenced(id, epoch, token) then
  return { 'lost' }
end
redis.call('DEL', key_of('steps', id), key_of('consumed', id))
release_lease(id, indexed_columns(id), clear_problem(row, {
  status = 'pending', wake_at = int(now), updated_at = int(now), continued_at = int(now), attempts = '0', claimed_length = '0',
  call = call, generation = int(number_in(row.generation) + 1), first_input_hash = row.first_input_hash or row.input_hash,
  input = input, input_hash = input_hash, seed = seed,
  definition_hash = definition_hash ~= '' and definition_hash or NONE, deadline = deadline ~= '' and deadline or NONE,
}))
publish_change()
return { 'ok' }
