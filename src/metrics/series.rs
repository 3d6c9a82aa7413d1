//! The numbers behind a metric, and how Prometheus reads them.
//!
//! Invariant: a family has as many series as its label has words, from the first scrape to the last.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a metric is called and means.
#[derive(Debug)]
pub struct Definition {
    /// By Prometheus' conventions, unit last.
    pub name: &'static str,
    /// What it does over time.
    pub kind: Kind,
    /// Label names with their words; no words = not a closed list in this file.
    pub labels: &'static [(&'static str, &'static [&'static str])],
    /// One sentence.
    pub help: &'static str,
}

/// What a metric does over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts samples by size.
    Histogram,
}

/// The upper bounds of a histogram's buckets, in the samples' unit, and what divides a sample into the exported unit.
#[derive(Debug)]
pub struct Bounds<const B: usize> {
    upper: [u64; B],
    divisor: f64,
}

/// What every metric can do.
pub trait Family: Sync {
    /// Name, kind, labels, help.
    fn definition(&self) -> &Definition;
    /// Appends the head and all series.
    fn render(&self, text: &mut String);
}

/// Numbers that only grow, one per word of the label.
#[derive(Debug)]
pub struct Counters<const N: usize>(Numbers<N>);

/// Numbers that are set, one per word of the label.
#[derive(Debug)]
pub struct Gauges<const N: usize>(Numbers<N>);

/// Samples by size, one series per word of the label.
#[derive(Debug)]
pub struct Histograms<const N: usize, const B: usize> {
    definition: Definition,
    bounds: &'static Bounds<B>,
    series: [Buckets<B>; N],
}

#[derive(Debug)]
struct Numbers<const N: usize> {
    definition: Definition,
    values: [AtomicU64; N],
}

#[derive(Debug)]
struct Buckets<const B: usize> {
    /// Not cumulative: one addition per sample.
    counts: [AtomicU64; B],
    beyond: AtomicU64,
    sum: AtomicU64,
}

impl<const B: usize> Bounds<B> {
    /// Of samples in nanoseconds, exported in seconds.
    pub const fn seconds(nanoseconds: [u64; B]) -> Self {
        Self { upper: nanoseconds, divisor: 1e9 }
    }

    /// Of plain numbers.
    pub const fn whole(upper: [u64; B]) -> Self {
        Self { upper, divisor: 1.0 }
    }
}

impl<const N: usize> Numbers<N> {
    const fn new(definition: Definition) -> Self {
        assert!(N == definition.series());
        Self { definition, values: [const { AtomicU64::new(0) }; N] }
    }

    fn render(&self, text: &mut String) {
        self.definition.head(text);
        for (index, value) in self.values.iter().enumerate() {
            sample(text, self.definition.name, &self.definition.label(index), value.load(Relaxed) as f64);
        }
    }
}

impl<const N: usize> Counters<N> {
    pub const fn new(definition: Definition) -> Self {
        Self(Numbers::new(definition))
    }

    pub fn add(&self, index: usize, count: u64) {
        self.0.values[index].fetch_add(count, Relaxed);
    }
}

impl<const N: usize> Gauges<N> {
    pub const fn new(definition: Definition) -> Self {
        Self(Numbers::new(definition))
    }

    pub fn set(&self, index: usize, value: u64) {
        self.0.values[index].store(value, Relaxed);
    }
}

impl<const N: usize, const B: usize> Histograms<N, B> {
    pub const fn new(definition: Definition, bounds: &'static Bounds<B>) -> Self {
        assert!(N == definition.series());
        let empty = const {
            [const { Buckets { counts: [const { AtomicU64::new(0) }; B], beyond: AtomicU64::new(0), sum: AtomicU64::new(0) } }; N]
        };
        Self { definition, bounds, series: empty }
    }

    /// Adds one sample, in the bounds' unit.
    pub fn observe(&self, index: usize, value: u64) {
        let series = &self.series[index];
        let bucket = self.bounds.upper.iter().position(|upper| value <= *upper);
        bucket.map_or(&series.beyond, |bucket| &series.counts[bucket]).fetch_add(1, Relaxed);
        series.sum.fetch_add(value, Relaxed);
    }
}

impl<const N: usize> Family for Counters<N> {
    fn definition(&self) -> &Definition {
        &self.0.definition
    }

    fn render(&self, text: &mut String) {
        self.0.render(text);
    }
}

impl<const N: usize> Family for Gauges<N> {
    fn definition(&self) -> &Definition {
        &self.0.definition
    }

    fn render(&self, text: &mut String) {
        self.0.render(text);
    }
}

impl<const N: usize, const B: usize> Family for Histograms<N, B> {
    fn definition(&self) -> &Definition {
        &self.definition
    }

    fn render(&self, text: &mut String) {
        self.definition.head(text);
        let [bucket, sum, count] = ["bucket", "sum", "count"].map(|end| format!("{}_{end}", self.definition.name));
        for (index, series) in self.series.iter().enumerate() {
            let label = self.definition.label(index);
            let with_bound = |bound: &str, text: &mut String, value: u64| {
                let mut labels = label.clone();
                labels.push(("le", bound));
                sample(text, &bucket, &labels, value as f64);
            };
            let mut total = 0;
            for (upper, number) in self.bounds.upper.iter().zip(&series.counts) {
                total += number.load(Relaxed);
                with_bound(&(*upper as f64 / self.bounds.divisor).to_string(), text, total);
            }
            total += series.beyond.load(Relaxed);
            with_bound("+Inf", text, total);
            sample(text, &sum, &label, series.sum.load(Relaxed) as f64 / self.bounds.divisor);
            sample(text, &count, &label, total as f64);
        }
    }
}

impl Definition {
    /// The two lines above the series.
    pub fn head(&self, text: &mut String) {
        let _ = writeln!(text, "# HELP {} {}\n# TYPE {} {}", self.name, self.help, self.name, self.kind.word());
    }

    /// The metric's row in the documentation.
    pub fn row(&self) -> String {
        let label = |(name, words): &(&str, &[&str])| match words.join(", ") {
            words if words.is_empty() => format!("`{name}`"),
            words => format!("`{name}`: {words}"),
        };
        let labels = self.labels.iter().map(label).collect::<Vec<_>>().join("; ");
        format!("| `{}` | {} | {labels} | {} |\n", self.name, self.kind.word(), self.help)
    }

    /// One series without a label, else one per word of the only label.
    const fn series(&self) -> usize {
        match self.labels {
            [] => 1,
            [(_, words)] => words.len(),
            _ => panic!("a fixed family has one label at most"),
        }
    }

    fn label(&self, index: usize) -> Vec<(&str, &str)> {
        self.labels.iter().map(|(name, words)| (*name, words[index])).collect()
    }
}

impl Kind {
    const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Appends one line.
pub fn sample(text: &mut String, name: &str, labels: &[(&str, &str)], value: f64) {
    text.push_str(name);
    for (index, (label, word)) in labels.iter().enumerate() {
        let word = word.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let _ = write!(text, "{}{label}=\"{word}\"", if index == 0 { '{' } else { ',' });
    }
    let _ = writeln!(text, "{} {value}", if labels.is_empty() { "" } else { "}" });
}
