//! What of other people's text may be shown.
//!
//! Invariant: what passes shows as itself: nothing that a terminal obeys, ends a line, hides, or turns its surroundings round.

/// Whether it prints as itself: no control character, no separator of lines, nothing invisible, no change of direction.
#[must_use]
pub(crate) fn prints(c: char) -> bool {
    let hides = matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    !c.is_control() && !hides
}

/// With a mark in the place of what does not print.
#[must_use]
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if prints(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_that_a_terminal_obeys_or_that_turns_or_hides_what_stands_beside_it() {
        assert_eq!(printable("\u{1b}[2J\t\u{9b}1m\u{7f}\n"), "\u{fffd}[2J\u{fffd}\u{fffd}1m\u{fffd}\u{fffd}");
        assert_eq!(printable("1\u{202e}2\u{2028}3\u{200b}4\u{2066}5\u{feff}"), "1\u{fffd}2\u{fffd}3\u{fffd}4\u{fffd}5\u{fffd}");
        let harmless = "Zoë 用 🛒 שלום naïve";
        assert_eq!(printable(harmless), harmless);
    }
}
