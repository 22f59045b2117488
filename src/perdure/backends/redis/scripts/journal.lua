-- id, after -> entries
return redis.call('ZRANGEBYSCORE', key_of('steps', take()), '(' .. take(), '+inf')
