-- perdure's tables, version 1, for PostgreSQL through a client. A name after a dollar sign stands for a quoted identifier.
-- A statement ends with a semicolon at the end of a line, and nowhere else does a line end with one.
-- Instants are microseconds UTC. Text sorts and compares by its bytes. An index row holds at most 2,704 bytes, so no index has
-- more than two columns of names (1,024 bytes each) beside the namespace (255 bytes).

CREATE TABLE $meta (
    name text PRIMARY KEY,
    value bigint NOT NULL
);

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
    journal_length bigint NOT NULL,
    workflow text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    priority bigint NOT NULL,
    limit_key text COLLATE "C",
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    start_at bigint,
    deadline bigint,
    parent_id text COLLATE "C",
    parent_key text COLLATE "C",
    parent_notified smallint NOT NULL,
    definition_hash text,
    seed text NOT NULL,
    input_hash text NOT NULL,
    waiting_for text NOT NULL,
    metadata text NOT NULL,
    progress text,
    outcome text,
    input text NOT NULL,
    PRIMARY KEY (namespace, id)
);

CREATE INDEX $runs_wake ON $runs (namespace, workflow, queue, priority, wake_at)
WHERE wake_at IS NOT NULL AND held = 0;

CREATE INDEX $runs_due ON $runs ((namespace || ''), wake_at, id)
WHERE wake_at IS NOT NULL AND held = 0;

CREATE INDEX $runs_leased ON $runs (namespace, queue, lease_until)
WHERE lease_until IS NOT NULL;

CREATE INDEX $runs_changed ON $runs (namespace, status, updated_at DESC, id);

CREATE INDEX $runs_of_workflow ON $runs (namespace, workflow, status, updated_at DESC);

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
    args_hash text,
    payload text NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
);

CREATE TABLE $signals (
    namespace text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    dedupe text COLLATE "C",
    identity text COLLATE "C" NOT NULL,
    consumed_by text,
    payload text NOT NULL,
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
    payload text NOT NULL,
    PRIMARY KEY (namespace, run_id, stream, n)
);

CREATE TABLE $queues (
    namespace text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    concurrency bigint,
    key_concurrency bigint,
    PRIMARY KEY (namespace, queue)
);

CREATE TABLE $schedules (
    namespace text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    workflow text COLLATE "C" NOT NULL,
    spec text NOT NULL,
    next_at bigint,
    metadata text NOT NULL,
    input text NOT NULL,
    PRIMARY KEY (namespace, id)
);
