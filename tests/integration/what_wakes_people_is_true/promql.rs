//! What a query says, judged without a server: which labels its result has, and what in it can never be true.

use std::collections::BTreeSet;

use promql_parser::label::{MatchOp, Matcher};
use promql_parser::parser::{BinaryExpr, Call, Expr, LabelModifier, VectorMatchCardinality, VectorSelector, parse};

use super::catalogue::{Catalogue, TARGET};

/// The labels of a result; a number has none.
pub type Labels = BTreeSet<String>;

/// A query with what it says.
pub struct Query<'a> {
    metrics: &'a Catalogue,
    /// The series that it reads.
    pub selectors: Vec<VectorSelector>,
    /// The numbers that it compares with.
    pub limits: Vec<f64>,
    /// The labels of its result.
    pub labels: Labels,
}

impl<'a> Query<'a> {
    /// Judges the text of a query.
    ///
    /// # Panics
    /// When it is none, or could never match anything.
    pub fn of(text: &str, metrics: &'a Catalogue) -> Self {
        let expr = parse(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let mut query = Self { metrics, selectors: Vec::new(), limits: Vec::new(), labels: Labels::new() };
        query.labels = query.judge(&expr).unwrap_or_else(|fault| panic!("{fault}: {text}")).unwrap_or_default();
        query
    }

    fn judge(&mut self, expr: &Expr) -> Result<Option<Labels>, String> {
        match expr {
            Expr::NumberLiteral(_) => Ok(None),
            Expr::Paren(inner) => self.judge(&inner.expr),
            Expr::VectorSelector(selector) => self.select(selector).map(Some),
            Expr::MatrixSelector(matrix) => self.select(&matrix.vs).map(Some),
            Expr::Call(call) => self.call(call),
            Expr::Binary(binary) => self.binary(binary),
            Expr::Aggregate(aggregate) => {
                let inner = self.judge(&aggregate.expr)?.ok_or("a number has nothing to aggregate")?;
                match &aggregate.modifier {
                    None => Ok(Some(Labels::new())),
                    Some(LabelModifier::Include(by)) => within(&by.labels, &inner).map(Some),
                    Some(LabelModifier::Exclude(_)) => Err("say `by`: `without` keeps whatever a scrape adds".to_owned()),
                }
            }
            Expr::Unary(_) | Expr::Subquery(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {
                Err(format!("not known here: {expr}"))
            }
        }
    }

    fn select(&mut self, selector: &VectorSelector) -> Result<Labels, String> {
        let name = selector.name.as_deref().ok_or("a series without a name")?;
        let metric = self.metrics.get(name).ok_or_else(|| format!("there is no {name}"))?;
        let labels = metric.labels();
        for Matcher { op, name: label, value } in &selector.matchers.matchers {
            within(std::slice::from_ref(label), &labels)?;
            let values: Vec<&str> = match op {
                MatchOp::Equal | MatchOp::NotEqual => vec![value],
                MatchOp::Re(_) | MatchOp::NotRe(_) => value.split('|').collect(),
            };
            let is_variable = value.starts_with('$') || TARGET.contains(&label.as_str());
            if let Some(value) = values.into_iter().find(|value| !is_variable && !metric.can_have(label, value)) {
                return Err(format!("{name} never has {label}={value:?}"));
            }
        }
        self.selectors.push(selector.clone());
        Ok(labels)
    }

    fn call(&mut self, call: &Call) -> Result<Option<Labels>, String> {
        let mut labels = None;
        for argument in &call.args.args {
            labels = self.judge(argument)?.or(labels);
        }
        match (call.func.name, labels) {
            ("time", None) => Ok(None),
            ("absent", Some(_)) => Ok(Some(Labels::new())),
            ("changes", labels @ Some(_)) => Ok(labels),
            ("rate" | "increase", labels @ Some(_)) => {
                let name = self.selectors.last().and_then(|selector| selector.name.clone()).unwrap_or_default();
                let grows = self.metrics.get(&name).is_some_and(|metric| metric.is_counter);
                if grows { Ok(labels) } else { Err(format!("{name} does not only grow")) }
            }
            ("histogram_quantile", Some(mut labels)) => match labels.remove("le") {
                true => Ok(Some(labels)),
                false => Err("a histogram without its buckets".to_owned()),
            },
            (other, _) => Err(format!("not known here: {other}")),
        }
    }

    fn binary(&mut self, binary: &BinaryExpr) -> Result<Option<Labels>, String> {
        if let (true, Expr::NumberLiteral(limit)) = (binary.op.is_comparison_operator(), &*binary.rhs) {
            self.limits.push(limit.val);
        }
        let (left, right) = match (self.judge(&binary.lhs)?, self.judge(&binary.rhs)?) {
            (Some(left), Some(right)) => (left, right),
            (left, right) => return Ok(left.or(right)),
        };
        let modifier = binary.modifier.as_ref();
        let on = match modifier.and_then(|modifier| modifier.matching.as_ref()) {
            Some(LabelModifier::Include(on)) => {
                within(&on.labels, &left)?;
                Some(within(&on.labels, &right)?)
            }
            Some(LabelModifier::Exclude(_)) => return Err("say `on`: `ignoring` compares whatever a scrape adds".to_owned()),
            None => None,
        };
        if binary.op.to_string() == "or" {
            return Ok(Some(&left | &right));
        }
        if on.is_none() && left != right {
            return Err(format!("{left:?} is never equal to {right:?}"));
        }
        let keeps_left = binary.op.is_set_operator()
            || modifier.is_some_and(|modifier| matches!(modifier.card, VectorMatchCardinality::ManyToOne(_)));
        Ok(Some(if keeps_left { left } else { on.unwrap_or(left) }))
    }
}

/// These labels, if all of them are there.
fn within(labels: &[String], there: &Labels) -> Result<Labels, String> {
    match labels.iter().find(|label| !there.contains(*label)) {
        Some(label) => Err(format!("there is no label {label} among {there:?}")),
        None => Ok(labels.iter().cloned().collect()),
    }
}
