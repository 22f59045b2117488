-- perdure's tables, version 5, for PostgreSQL. A name after a dollar sign stands for a quoted identifier or a word of the dialect.
-- A statement ends with a semicolon at the end of a line, and nowhere else does a line end with one.
-- Instants are microseconds UTC. Text sorts and compares by its bytes. An index row holds at most 2,704 bytes, so no index has
-- more than two columns of names (1,024 bytes each) beside the namespace (255 bytes).

CREATE TABLE $meta (
    name text PRIMARY KEY,
    value bigint NOT NULL
);

-- inbox_seq is the highest seq in the run's inbox. Every append to the inbox changes it, so a statement that has locked the row
-- knows whether its snapshot has the whole inbox.
CREATE TABLE $runs (
    namespace text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    lease_token text COLLATE "C",
    cancel_requested smallint NOT NULL,
    inbox_seq bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    held smallint NOT NULL,
    wake_at bigint,
    lease_until bigint,
    lease_owner text,
    attempts bigint NOT NULL,
    problem_at bigint,
    problem_count bigint NOT NULL,
    journal_length bigint NOT NULL,
    workflow text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    generation bigint NOT NULL,
    queue text COLLATE "C" NOT NULL,
    priority bigint NOT NULL,
    limit_key text COLLATE "C",
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    start_at bigint,
    deadline bigint,
    continued_at bigint,
    parent_id text COLLATE "C",
    parent_key text COLLATE "C",
    parent_notified smallint NOT NULL,
    definition_hash text,
    seed $payload NOT NULL,
    input_hash $payload NOT NULL,
    first_input_hash $payload,
    waiting_for text NOT NULL,
    problem text,
    metadata $payload NOT NULL,
    running_steps $payload,
    progress $payload,
    outcome $payload,
    input $payload NOT NULL,
    PRIMARY KEY (namespace, id)
) WITH (fillfactor = 80);

-- The indexes below have (namespace || ''), and statements that use them say so, to leave runs that are asked for by id to the
-- primary key: while the tables are new all indexes look alike to PostgreSQL, and a plan that was made then is used for long.

-- What may be claimed, group by group: claim walks the distinct (workflow, version, queue, priority, whether it ever started) and
-- never a sleeping run.
CREATE INDEX $runs_wake ON $runs ((namespace || ''), workflow, version, queue, priority, ((epoch > 0)::int), wake_at)
WHERE wake_at IS NOT NULL AND held = 0;

-- What is due, whatever its workflow and queue. Its expression is another one, which keeps it out of claims: PostgreSQL would take
-- it for the order, and read the runs of other workflows.
CREATE INDEX $runs_due ON $runs ((namespace || '' || ''), wake_at, id)
WHERE wake_at IS NOT NULL AND held = 0;

-- How many runs of a queue are leased.
CREATE INDEX $runs_leased ON $runs ((namespace || ''), queue, lease_until)
WHERE lease_until IS NOT NULL;

-- Lists and purges, status by status, and those of one workflow or queue. Again other expressions: for the order, PostgreSQL would
-- take the first index for a rare workflow too, and read the runs of all others. And it would take the second for claims, while a
-- table that has grown was not analysed yet: it is the smaller one, and has every sleeping run.
CREATE INDEX $runs_changed ON $runs (('' || namespace), status, updated_at DESC, id);

CREATE INDEX $runs_of_workflow ON $runs (('' || namespace || ''), workflow, queue, status, updated_at DESC);

CREATE TABLE $steps (
    namespace text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    epoch bigint NOT NULL,
    $key text COLLATE "C" NOT NULL,
    phase text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    ok smallint NOT NULL,
    attempt bigint NOT NULL,
    started_at bigint NOT NULL,
    took bigint NOT NULL,
    args_hash $payload,
    payload $payload NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
);

-- identity is made of name and dedupe, or random without a dedupe: a signal that is sent again after a lost reply is found by it.
CREATE TABLE $signals (
    namespace text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    dedupe text COLLATE "C",
    identity text COLLATE "C" NOT NULL,
    consumed_by text,
    payload $payload NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
);

CREATE UNIQUE INDEX $signals_identity ON $signals (namespace, run_id, identity);

CREATE INDEX $signals_waiting ON $signals (namespace, run_id, seq)
WHERE consumed_by IS NULL;

CREATE TABLE $items (
    namespace text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    stream text COLLATE "C" NOT NULL,
    n bigint NOT NULL,
    payload $payload NOT NULL,
    PRIMARY KEY (namespace, run_id, stream, n)
);

CREATE TABLE $queues (
    namespace text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    concurrency bigint,
    per_key bigint,
    start_interval bigint,
    last_start_at bigint,
    PRIMARY KEY (namespace, queue)
);

CREATE TABLE $schedules (
    namespace text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    workflow text COLLATE "C" NOT NULL,
    spec text NOT NULL,
    next_at bigint,
    metadata $payload NOT NULL,
    input $payload NOT NULL,
    PRIMARY KEY (namespace, id)
);

CREATE TABLE $workers (
    namespace text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    seen_at bigint NOT NULL,
    info $payload NOT NULL,
    PRIMARY KEY (namespace, id)
);
