-- id, after -> unconsumed rows
return redis.call('ZRANGEBYSCORE', key_of('inbox', take()), '(' .. take(), '+inf')
