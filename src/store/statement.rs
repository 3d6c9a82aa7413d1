//! Hand-written SQL that is prepared once per connection.
//!
//! `diesel::sql_query` is prepared anew at each call, which halves the throughput; a fragment with a static `QueryId` is not.

/// Declares a statement: its parameters with their SQL types, in the order in which the SQL names each of them once (`:name`), and
/// the SQL types of its rows (none for a statement that is only executed).
macro_rules! statement {
    ($(#[$meta:meta])* $name:ident $(<$life:lifetime>)? { $($param:ident: $rust:ty => $sql_type:ty),* $(,)? } -> $rows:ty { $sql:expr }) => {
        $(#[$meta])*
        struct $name $(<$life>)? {
            $($param: $rust,)*
        }

        const _: () = {
            use diesel::pg::Pg;
            use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};

            impl $(<$life>)? QueryFragment<Pg> for $name $(<$life>)? {
                fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> diesel::QueryResult<()> {
                    let rest = $sql;
                    $(
                        let (before, rest) = rest.split_once(concat!(":", stringify!($param))).expect("the SQL names its parameters in order");
                        out.push_sql(before);
                        out.push_bind_param::<$sql_type, _>(&self.$param)?;
                    )*
                    out.push_sql(rest);
                    Ok(())
                }
            }

            /// Stands for the SQL text in the cache of prepared statements.
            struct Id;

            impl $(<$life>)? QueryId for $name $(<$life>)? {
                type QueryId = Id;
                const HAS_STATIC_QUERY_ID: bool = true;
            }

            impl $(<$life>)? Query for $name $(<$life>)? {
                type SqlType = $rows;
            }
        };
    };
}
pub(super) use statement;

/// The text as it reaches the server.
#[cfg(feature = "lab")]
pub(super) fn text(statement: &impl diesel::query_builder::QueryFragment<diesel::pg::Pg>) -> String {
    use diesel::query_builder::QueryBuilder;
    let mut builder = diesel::pg::PgQueryBuilder::default();
    statement.to_sql(&mut builder, &diesel::pg::Pg).expect("a statement of ours only pushes text and parameters");
    builder.finish()
}
