-- -> limits, each after its queue
return redis.call('HGETALL', root .. ':limits')
