//! What was measured, as pictures.
//!
//! In: medians by their keys. Out: one SVG file for each group of cases that was measured. It owns the files.
//!
//! Invariant: a picture shows the figures of the last line and no others, and its axis begins at nothing.

use std::fs;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Result;

/// One figure and what it is drawn at.
type Point<'a> = (&'a str, f64);

const SIZE: (u32, u32) = (640, 320);
const INK: RGBColor = RGBColor(0x1f, 0x5f, 0x8b);

/// A picture of some figures.
struct Picture {
    file: &'static str,
    caption: &'static str,
    /// What the bars differ in.
    steps: &'static str,
    /// The key of each bar's figure, and its name.
    bars: &'static [(&'static str, &'static str)],
}

const PICTURES: [Picture; 4] = [
    Picture {
        file: "plain",
        caption: "thousand new events a second",
        steps: "",
        bars: &[
            ("raw_eps", "statements alone"),
            ("fresh_eps", "onceward"),
            ("peers.spring_batch.eps", "Spring batch"),
            ("peers.kafkajs_typeorm.eps", "KafkaJS"),
        ],
    },
    Picture {
        file: "concurrency",
        caption: "thousand events a second",
        steps: "pipeline.partition_concurrency",
        bars: &[("concurrency1_eps", "1"), ("concurrency3_eps", "3"), ("concurrency12_eps", "12")],
    },
    Picture {
        file: "repeats",
        caption: "thousand events a second",
        steps: "repeats among the events, per cent",
        bars: &[
            ("repeats0_eps", "0"),
            ("repeats0_1_eps", "0.1"),
            ("repeats1_eps", "1"),
            ("repeats5_eps", "5"),
            ("repeats50_eps", "50"),
            ("duplicates_eps", "100"),
        ],
    },
    Picture {
        file: "provider",
        caption: "thousand charged events a second",
        steps: "the provider answers after, milliseconds",
        bars: &[("provider0_eps", "0"), ("provider5_eps", "5"), ("provider20_eps", "20"), ("provider100_eps", "100")],
    },
];

/// Draws what there is of each picture into `folder`.
///
/// # Errors
/// A file cannot be written.
pub fn draw(folder: &Path, figure: impl Fn(&str) -> Option<f64>) -> Result<()> {
    fs::create_dir_all(folder)?;
    for picture in PICTURES {
        let points: Vec<Point<'_>> = picture.bars.iter().filter_map(|(key, name)| Some((*name, figure(key)? / 1e3))).collect();
        if points.len() > 1 {
            picture.draw(folder, &points)?;
        }
    }
    Ok(())
}

impl Picture {
    fn draw(&self, folder: &Path, points: &[Point<'_>]) -> Result<()> {
        let file = folder.join(format!("{}.svg", self.file));
        let root = SVGBackend::new(&file, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let most = points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        let last = points.len() as f64 - 0.5;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.caption, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(48)
            .build_cartesian_2d(-0.5..last, 0.0..most * 1.15)?;
        chart.configure_mesh().disable_x_mesh().disable_x_axis().light_line_style(WHITE).y_labels(6).draw()?;
        // Steps that nobody could draw to scale: each has the same width, and its name below it.
        let bar = |at: usize, value: f64| Rectangle::new([(at as f64 - 0.28, 0.0), (at as f64 + 0.28, value)], INK.filled());
        chart.draw_series(points.iter().enumerate().map(|(at, (_, value))| bar(at, *value)))?;
        let label = |x: f64, y: f64, down: i32, words: String| {
            let centred = Pos::new(HPos::Center, VPos::Center);
            EmptyElement::at((x, y)) + Text::new(words, (0, down), ("sans-serif", 13).into_font().color(&BLACK).pos(centred))
        };
        let values = points.iter().enumerate().map(|(at, (_, value))| label(at as f64, *value, -10, format!("{value:.1}")));
        let names = points.iter().enumerate().map(|(at, (name, _))| label(at as f64, 0.0, 14, (*name).to_owned()));
        let under = label((last - 0.5) / 2.0, 0.0, 34, self.steps.to_owned());
        chart.draw_series(values.chain(names).chain([under]))?;
        root.present()?;
        Ok(())
    }
}
