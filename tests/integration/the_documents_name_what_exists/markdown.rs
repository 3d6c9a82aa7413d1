//! As much of Markdown as these documents use.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A document.
pub struct Page {
    /// Its path below the root of the repository.
    pub name: String,
    /// The whole of it.
    pub text: String,
    /// What stands in no block, line by line; a line of a block is empty here.
    pub prose: String,
    /// Its fenced blocks, in their order.
    pub blocks: Vec<Block>,
}

/// A fenced block.
pub struct Block {
    /// The word behind the fence.
    pub language: String,
    /// The line of the document at which it begins.
    pub line: usize,
    /// What stands in it.
    pub text: String,
}

impl Page {
    pub fn read(root: &Path, file: &Path) -> Self {
        let name = file.strip_prefix(root).expect("below the root").display().to_string();
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (mut prose, mut blocks, mut open) = (String::new(), Vec::new(), None::<Block>);
        for (number, line) in text.lines().enumerate() {
            match (line.strip_prefix("```"), &mut open) {
                (Some(language), None) => {
                    open = Some(Block { language: language.to_owned(), line: number + 1, text: String::new() })
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
                (None, None) => prose.push_str(line),
            }
            prose.push('\n');
        }
        assert!(open.is_none(), "{name}: a block that is never closed");
        Self { name, text, prose, blocks }
    }

    /// What can be linked to in it, as GitHub and mdBook name it.
    pub fn anchors(&self) -> BTreeSet<String> {
        let mut times = BTreeMap::<String, usize>::new();
        let headings = self.prose.lines().filter(|line| line.starts_with('#'));
        let named = headings.map(|line| {
            let anchor = slug(line.trim_start_matches('#').trim());
            let before = times.entry(anchor.clone()).or_default();
            *before += 1;
            if *before == 1 { anchor } else { format!("{anchor}-{}", *before - 1) }
        });
        named.collect()
    }

    /// Each target of a link or a picture, with the line in which it stands.
    pub fn links(&self) -> Vec<(usize, &str)> {
        const MARKS: [(&str, char); 3] = [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"')];
        let lines = self.prose.lines().enumerate();
        let of_line = |(number, line): (usize, &'_ str)| -> Vec<(usize, std::ops::Range<usize>)> {
            let start = line.as_ptr() as usize - self.prose.as_ptr() as usize;
            let of_mark = |(mark, end): (&str, char)| {
                let places = line.match_indices(mark).map(|(at, found)| at + found.len()).collect::<Vec<_>>();
                let ends = places.into_iter().filter_map(move |at| Some((at, at + line[at..].find(end)?)));
                ends.map(|(from, to)| (number + 1, start + from..start + to)).collect::<Vec<_>>()
            };
            MARKS.into_iter().flat_map(of_mark).collect()
        };
        lines.flat_map(of_line).map(|(number, range)| (number, &self.prose[range])).collect()
    }

    /// What stands between single backticks.
    pub fn code(&self) -> impl Iterator<Item = &str> {
        self.prose.lines().flat_map(|line| line.split('`').skip(1).step_by(2))
    }
}

fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}
