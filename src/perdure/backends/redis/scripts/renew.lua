-- now, ttl, leases (id, epoch, token, running steps or nothing) -> for each a pulse or nothing
local now, length, leases = take_now(), tonumber(take()), take_list()
local until_, pulses = int(now + length), {}
for i = 1, #leases, 4 do
  local id, steps = leases[i], leases[i + 3]
  if is_fenced(id, leases[i + 1], leases[i + 2]) then
    change_run(id, indexed_columns(id), {
      lease_until = until_, wake_at = until_, updated_at = int(now), running_steps = steps == '' and NONE or steps,
    })
    pulses[#pulses + 1] = pulse(id)
  else
    pulses[#pulses + 1] = { 'lost' }
  end
end
return pulses
