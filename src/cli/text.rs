//! What several commands say in the same way.

use std::ffi::OsString;

use crate::text::printable;

/// Who decides: as was said, or the user of this shell.
pub fn actor(said: Option<&str>, environment: &[(OsString, OsString)]) -> String {
    let of =
        |name: &str| environment.iter().find(|(found, _)| found == name).map(|(_, value)| value.to_string_lossy().into_owned());
    let user = || of("USER").or_else(|| of("LOGNAME")).filter(|user| !user.is_empty());
    said.map(str::to_owned).or_else(user).unwrap_or_else(|| "unknown".to_owned())
}

/// Lines whose columns are as wide as they must be, below a head.
pub fn table_of<const N: usize>(head: [&str; N], lines: impl Iterator<Item = [String; N]>) -> String {
    let lines: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(lines).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Several lines of other people's text.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_decides_is_who_says_so_or_the_user_of_the_shell() {
        let shell = |name: &str, user: &str| [(OsString::from(name), OsString::from(user))];
        assert_eq!(actor(Some("ann"), &shell("USER", "bob")), "ann");
        assert_eq!(actor(None, &shell("USER", "bob")), "bob");
        assert_eq!(actor(None, &shell("LOGNAME", "bob")), "bob");
        assert_eq!(actor(None, &shell("USER", "")), "unknown");
        assert_eq!(actor(None, &[]), "unknown");
    }

    #[test]
    fn columns_are_as_wide_as_they_must_be_and_nothing_moves_the_cursor() {
        let line = |words: [&str; 2]| words.map(str::to_owned);
        let text = table_of(["a", "bb"], [line(["long", "x"]), line(["y", ""])].into_iter());
        assert_eq!(text, "a     bb\nlong  x\ny\n");
        assert_eq!(printable_lines("\x1b[2J\tname\nnext\n"), "\u{fffd}[2J\u{fffd}name\nnext\n");
    }
}
