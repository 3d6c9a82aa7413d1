// The consumer of the reference: one transaction and one offset commit per event.

import 'reflect-metadata';
import { Kafka, logLevel } from 'kafkajs';
import { DataSource, EntitySchema } from 'typeorm';
import { z } from 'zod';

// As many events at once as the topic has partitions, one connection for each.
const CONCURRENCY = 12;

const required = (name) => {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set`);
  return value;
};
const [brokers, topic, groupId, url] = ['PEER_BROKERS', 'PEER_TOPIC', 'PEER_GROUP', 'PEER_DATABASE_URL'].map(required);

const ProcessedEvent = new EntitySchema({
  name: 'processed_event',
  columns: {
    eventId: { type: 'uuid', name: 'event_id', primary: true },
    consumerGroup: { type: 'text', name: 'consumer_group' },
    processedAt: { type: 'timestamptz', name: 'processed_at', default: () => 'now()' },
  },
});

const Payment = new EntitySchema({
  name: 'payment',
  columns: {
    eventId: { type: 'uuid', name: 'event_id', primary: true },
    orderId: { type: 'bigint', name: 'order_id' },
    customerId: { type: 'bigint', name: 'customer_id' },
    amount: { type: 'numeric' },
    currency: { type: 'text' },
    status: { type: 'text' },
    createdAt: { type: 'timestamptz', name: 'created_at', default: () => 'now()' },
  },
});

const orderConfirmed = z.object({
  eventId: z.uuid(),
  eventType: z.literal('order.confirmed.v1'),
  occurredAt: z.iso.datetime(),
  orderId: z.number().int().positive(),
  customerId: z.number().int().positive(),
  totalAmount: z.number().positive(),
  currency: z.string().length(3),
});

const dataSource = new DataSource({
  type: 'postgres',
  url,
  entities: [ProcessedEvent, Payment],
  poolSize: CONCURRENCY,
});

/** One INSERT that asks for nothing back but the id: `updateEntity` would read the defaults as well. */
const insert = (manager, entity, values) =>
  manager.createQueryBuilder().insert().into(entity).values(values).updateEntity(false);

/** Claims the event and writes its payment, or finds that somebody has. */
const apply = (event) =>
  dataSource.transaction(async (manager) => {
    const claimed = await insert(manager, ProcessedEvent, { eventId: event.eventId, consumerGroup: groupId })
      .orIgnore()
      .returning('event_id')
      .execute();
    // The reference asks for `identifiers`, which TypeORM fills from the values also when no row was inserted.
    if (claimed.raw.length === 0) return;
    await insert(manager, Payment, {
      eventId: event.eventId,
      orderId: event.orderId,
      customerId: event.customerId,
      amount: event.totalAmount,
      currency: event.currency,
      status: 'charged',
    }).execute();
  });

const kafka = new Kafka({ clientId: 'kafkajs-typeorm', brokers: brokers.split(','), logLevel: logLevel.WARN });
const consumer = kafka.consumer({ groupId });

const stop = async () => {
  await consumer.disconnect();
  await dataSource.destroy();
};
process.once('SIGTERM', stop);

await dataSource.initialize();
await consumer.connect();
await consumer.subscribe({ topic, fromBeginning: true });
consumer.on(consumer.events.GROUP_JOIN, () => console.log('ready'));
// An end that KafkaJS does not begin anew by itself must not look like a consumer without work.
consumer.on(consumer.events.CRASH, ({ payload }) => {
  if (!payload.restart) process.exit(1);
});
await consumer.run({
  autoCommit: false,
  partitionsConsumedConcurrently: CONCURRENCY,
  eachMessage: async ({ topic, partition, message }) => {
    await apply(orderConfirmed.parse(JSON.parse(message.value.toString())));
    await consumer.commitOffsets([{ topic, partition, offset: (BigInt(message.offset) + 1n).toString() }]);
  },
});
