#!/bin/sh
# The rights in Kafka that each command needs, and no more, for a broker with an authorizer. A test runs every command under exactly these.
#
#   KAFKA_ACLS="kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties" \
#     TOPIC=orders.confirmed GROUP=billing-order-confirmed sh ops/acls.sh run User:billing
#
# Read and Write include Describe. The topics are made by whoever may make topics; `onceward` makes none. `held`, `partition`,
# `actions`, `retention`, `migrate` and `audit --tables-only` speak to the database alone.
set -eu

command=$1 principal=$2
topic=${TOPIC:-orders.confirmed} group=${GROUP:-billing-order-confirmed}

acls() { ${KAFKA_ACLS:-kafka-acls.sh} --add --allow-principal "$principal" "$@"; }

case $command in
run)
  acls --operation Read --topic "$topic" --group "$group"
  acls --operation DescribeConfigs --topic "$topic" # how long records can be delivered again, and that none are compacted away
  acls --operation Write --topic "$topic.dlq"       # not with held.dead_letters = false
  ;;
check)
  acls --operation Read --topic "$topic"
  acls --operation DescribeConfigs --topic "$topic"
  acls --operation Describe --operation DescribeConfigs --topic __consumer_offsets
  acls --operation Describe --group "$group"
  acls --operation DescribeConfigs --cluster # the brokers' own settings
  ;;
audit)
  acls --operation Read --topic "$topic"
  acls --operation Describe --group "$group" # a reader looks for its group's coordinator, though it never joins
  ;;
offsets | status)
  acls --operation Describe --topic "$topic" --group "$group"
  ;;
produce)
  acls --operation Write --topic "$topic"
  ;;
*)
  echo "usage: $0 run|check|audit|offsets|status|produce User:NAME" >&2
  exit 64
  ;;
esac
