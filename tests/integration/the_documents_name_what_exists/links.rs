//! Where the documents point to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::{pages, root};

#[test]
fn every_link_leads_to_a_file_and_to_a_heading_in_it() {
    let pages = pages();
    let anchors: BTreeMap<&str, BTreeSet<String>> = pages.iter().map(|page| (page.name.as_str(), page.anchors())).collect();
    let (mut seen, mut broken) = (0, Vec::new());
    for page in &pages {
        for (line, target) in page.links().into_iter().filter(|(_, target)| !target.contains("://")) {
            seen += 1;
            let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
            let folder = Path::new(&page.name).parent().expect("a page stands in a folder");
            let place = if path.is_empty() { page.name.clone() } else { plain(&folder.join(path)) };
            let is_there = root().join(&place).exists();
            let has_it = anchor.is_none_or(|anchor| anchors.get(place.as_str()).is_some_and(|known| known.contains(anchor)));
            if !is_there || !has_it {
                broken.push(format!("{}:{line}: {target}", page.name));
            }
        }
    }
    assert!(seen > 200 && broken.is_empty(), "{seen} links, of which lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn every_page_in_docs_is_in_the_book_once() {
    let pages = pages();
    let summary = pages.iter().find(|page| page.name == "docs/SUMMARY.md").expect("a summary");
    let mut in_the_book: Vec<String> =
        summary.links().into_iter().map(|(_, target)| plain(&Path::new("docs").join(target))).collect();
    in_the_book.sort();
    let of_docs = pages.iter().map(|page| page.name.clone()).filter(|name| name.starts_with("docs/") && name != &summary.name);
    assert_eq!(in_the_book, of_docs.collect::<Vec<_>>());
}

/// Without `..` in it.
fn plain(path: &Path) -> String {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(plain.pop(), "{} leads out of the repository", path.display()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain.display().to_string()
}
