-- perdure's tables, version 5, for MySQL and MariaDB. A name after a dollar sign stands for a quoted identifier.
-- A statement ends with a semicolon at the end of a line, and nowhere else does a line end with one.
-- Instants are microseconds UTC. Names are bytes, so that case, accents and spaces at the end count. CREATE TABLE cannot be
-- undone here, so each can be repeated, with its indexes; an index holds at most 3,072 bytes. There are no partial indexes:
-- may_wake and unconsumed are NULL in the rows that no statement looks for.

CREATE TABLE IF NOT EXISTS $meta (
    name VARBINARY(64) NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $runs (
    namespace VARBINARY(255) NOT NULL,
    id VARBINARY(1024) NOT NULL,
    epoch BIGINT NOT NULL,
    lease_token VARBINARY(64),
    cancel_requested TINYINT NOT NULL,
    inbox_seq BIGINT NOT NULL,
    status VARBINARY(16) NOT NULL,
    held TINYINT NOT NULL,
    wake_at BIGINT,
    may_wake TINYINT AS (CASE WHEN wake_at IS NOT NULL AND held = 0 THEN 1 END) VIRTUAL,
    -- Stored, because it is selected: from an index that covers the statement, MariaDB 10.11 gives 0 for a virtual column.
    is_started TINYINT AS (CASE WHEN epoch > 0 THEN 1 ELSE 0 END) STORED,
    lease_until BIGINT,
    lease_owner LONGBLOB,
    attempts BIGINT NOT NULL,
    problem_at BIGINT,
    problem_count BIGINT NOT NULL,
    journal_length BIGINT NOT NULL,
    workflow VARBINARY(1024) NOT NULL,
    version BIGINT NOT NULL,
    queue VARBINARY(1024) NOT NULL,
    priority BIGINT NOT NULL,
    limit_key LONGBLOB,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    start_at BIGINT,
    deadline BIGINT,
    parent_id LONGBLOB,
    parent_key LONGBLOB,
    parent_notified TINYINT NOT NULL,
    definition_hash LONGBLOB,
    seed LONGBLOB NOT NULL,
    input_hash LONGBLOB NOT NULL,
    waiting_for LONGBLOB NOT NULL,
    problem LONGBLOB,
    metadata LONGBLOB NOT NULL,
    running_steps LONGBLOB,
    progress LONGBLOB,
    outcome LONGBLOB,
    input LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, id),
    INDEX $runs_wake (namespace, may_wake, workflow, version, queue, priority, is_started, wake_at),
    INDEX $runs_due (namespace, may_wake, wake_at, id),
    INDEX $runs_leased (namespace, queue, lease_until),
    INDEX $runs_changed (namespace, status, updated_at DESC, id),
    INDEX $runs_of_workflow (namespace, workflow, queue, status, updated_at DESC)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $steps (
    namespace VARBINARY(255) NOT NULL,
    run_id VARBINARY(1024) NOT NULL,
    seq BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    $key LONGBLOB NOT NULL,
    phase VARBINARY(16) NOT NULL,
    kind VARBINARY(16) NOT NULL,
    name LONGBLOB NOT NULL,
    ok TINYINT NOT NULL,
    attempt BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    took BIGINT NOT NULL,
    args_hash LONGBLOB,
    payload LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $signals (
    namespace VARBINARY(255) NOT NULL,
    run_id VARBINARY(1024) NOT NULL,
    seq BIGINT NOT NULL,
    kind VARBINARY(16) NOT NULL,
    name LONGBLOB NOT NULL,
    dedupe LONGBLOB,
    identity VARBINARY(64) NOT NULL,
    consumed_by VARBINARY(64),
    unconsumed TINYINT AS (CASE WHEN consumed_by IS NULL THEN 1 END) VIRTUAL,
    payload LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, seq),
    UNIQUE INDEX $signals_identity (namespace, run_id, identity),
    INDEX $signals_waiting (namespace, run_id, unconsumed, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $items (
    namespace VARBINARY(255) NOT NULL,
    run_id VARBINARY(1024) NOT NULL,
    stream VARBINARY(1024) NOT NULL,
    n BIGINT NOT NULL,
    payload LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, stream, n)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $queues (
    namespace VARBINARY(255) NOT NULL,
    queue VARBINARY(1024) NOT NULL,
    concurrency BIGINT,
    per_key BIGINT,
    start_interval BIGINT,
    last_start_at BIGINT,
    PRIMARY KEY (namespace, queue)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $schedules (
    namespace VARBINARY(255) NOT NULL,
    id VARBINARY(1024) NOT NULL,
    workflow LONGBLOB NOT NULL,
    spec LONGBLOB NOT NULL,
    next_at BIGINT,
    metadata LONGBLOB NOT NULL,
    input LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS $workers (
    namespace VARBINARY(255) NOT NULL,
    id VARBINARY(1024) NOT NULL,
    seen_at BIGINT NOT NULL,
    info LONGBLOB NOT NULL,
    PRIMARY KEY (namespace, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
