-- The least that onceward needs in PostgreSQL. Run it as a superuser in onceward's database after the first `onceward migrate`, and again
-- after each that has applied something. It gives no passwords: `\password onceward_service`, or a certificate.
--
--   onceward_owner     `onceward migrate`; owns every table but the claims
--   onceward_service   `onceward run`, `check`, `retention run`; owns the claims, because only an owner makes and drops days
--   onceward_reader    `onceward status`, `audit`, `held list`, `held show`, `offsets show`, `actions`, `retention status`
--   onceward_operator  what the reader may, and `partition`, `offsets hold`, `offsets skip`, `held replay`, `held discard`, `held resolve`
--
-- Nobody but the superuser may delete or change a payment. A test runs the service and every command under exactly this.

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['onceward_owner', 'onceward_service', 'onceward_reader', 'onceward_operator'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I LOGIN', name);
        END IF;
    END LOOP;
END $$;

REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO onceward_owner, onceward_service, onceward_reader, onceward_operator;
GRANT CREATE ON SCHEMA public TO onceward_owner, onceward_service;
GRANT onceward_service TO onceward_owner; -- a migration may change the table of claims
GRANT onceward_reader TO onceward_operator;

ALTER TABLE __diesel_schema_migrations OWNER TO onceward_owner;
ALTER TABLE payment                    OWNER TO onceward_owner;
ALTER TABLE payment_attempt            OWNER TO onceward_owner;
ALTER TABLE attempt_batch              OWNER TO onceward_owner;
ALTER TABLE consumed_partition         OWNER TO onceward_owner;
ALTER TABLE held_event                 OWNER TO onceward_owner;
ALTER TABLE horizon_claim              OWNER TO onceward_owner;
ALTER TABLE operator_action            OWNER TO onceward_owner;
ALTER TABLE retention                  OWNER TO onceward_owner;

-- A plain `processed_event` of another service keeps its owner: no day is ever made or dropped there.
DO $$
DECLARE
    name regclass;
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'processed_event'::regclass) = 'p' THEN
        FOR name IN SELECT oid FROM pg_class
                    WHERE relnamespace = 'public'::regnamespace AND relname ~ '^processed_event(_\d{4}_\d{2}_\d{2})?$' AND relkind IN ('p', 'r')
        LOOP
            EXECUTE format('ALTER TABLE %s OWNER TO onceward_service', name);
        END LOOP;
    ELSE
        GRANT SELECT, INSERT, DELETE ON processed_event TO onceward_service;
    END IF;
END $$;

GRANT SELECT                         ON __diesel_schema_migrations TO onceward_service;
GRANT SELECT, INSERT                 ON payment                    TO onceward_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON payment_attempt            TO onceward_service;
GRANT SELECT, INSERT, DELETE         ON attempt_batch              TO onceward_service;
GRANT SELECT, INSERT, UPDATE         ON consumed_partition         TO onceward_service;
GRANT SELECT, INSERT, UPDATE         ON held_event                 TO onceward_service;
GRANT SELECT, INSERT, DELETE         ON horizon_claim              TO onceward_service;
GRANT SELECT, INSERT                 ON operator_action            TO onceward_service;
GRANT SELECT, INSERT, UPDATE         ON retention                  TO onceward_service;

GRANT SELECT ON processed_event, payment, payment_attempt, attempt_batch, consumed_partition, held_event, horizon_claim, operator_action, retention
    TO onceward_reader;

GRANT UPDATE (wanted, actor, note, state) ON held_event TO onceward_operator;
GRANT INSERT (source_id, source_offset, record_digest, headers, reason, error, state, owns_claim, actor, note, attempts)
    ON held_event TO onceward_operator;
GRANT INSERT (action, source_id, source_offset, to_offset, held_id, actor, reason) ON operator_action TO onceward_operator;
GRANT UPDATE (paused, paused_by, skips, epoch, owner, updated_at) ON consumed_partition TO onceward_operator;
