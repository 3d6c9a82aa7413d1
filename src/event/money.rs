//! Exact amounts: decimal text in, whole minor units inside, decimal text out.
//!
//! In: the text of a JSON number (or of PostgreSQL's `numeric`) and an ISO 4217 code. Out: [`Money`] or an [`AmountFault`]. It owns
//! nothing and cannot fail half way.
//!
//! Invariant: no value is ever rounded or passes through a float. An amount that the currency cannot express is a fault.

use std::fmt;

/// A currency of ISO 4217 in which something can be paid: it has a number of decimals and is neither a metal nor a test code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Currency(iso_currency::Currency);

/// By their codes.
impl Ord for Currency {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.code().cmp(other.code())
    }
}

impl PartialOrd for Currency {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// An exact amount of one currency, kept in its smallest unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Money {
    minor_units: i64,
    currency: Currency,
}

/// Why a text is no amount of its currency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmountFault {
    /// The text is not spelled as a JSON number.
    #[error("is no number")]
    NotANumber,
    /// The currency would need more decimals to express it.
    #[error("has more decimals than the currency has")]
    TooManyDecimals,
    /// It does not fit into 64 bits of minor units.
    #[error("is too large")]
    TooLarge,
}

/// Why a code names no [`Currency`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CurrencyFault {
    /// Not in the list (codes are upper case).
    #[error("is no currency of ISO 4217")]
    Unknown,
    /// In the list, but a metal, a unit of account, a test code or "no currency".
    #[error("is a code of ISO 4217 in which nobody can pay")]
    NotPayable,
}

impl Currency {
    /// A sum of amounts of this currency, with exactly its decimals: `10.00`, `500`, `1.234`.
    #[must_use]
    pub fn decimal_of(self, minor_units: i128) -> String {
        let (decimals, sign, amount) = (self.decimals(), if minor_units < 0 { "-" } else { "" }, minor_units.unsigned_abs());
        let unit = 10_u128.pow(decimals);
        match decimals as usize {
            0 => format!("{sign}{amount}"),
            width => format!("{sign}{}.{:0width$}", amount / unit, amount % unit),
        }
    }

    /// Looks a code up, such as `EUR`. Codes that were superseded stay valid: old events may be replayed.
    ///
    /// # Errors
    /// The code is unknown, or nothing can be paid in it (`XAU`, `XTS`, `XXX`, …).
    pub fn from_code(code: &str) -> Result<Self, CurrencyFault> {
        let currency = iso_currency::Currency::from_code(code).ok_or(CurrencyFault::Unknown)?;
        if currency.is_special() || currency.exponent().is_none() {
            return Err(CurrencyFault::NotPayable);
        }
        Ok(Self(currency))
    }

    /// Its three letters.
    #[must_use]
    pub fn code(self) -> &'static str {
        self.0.code()
    }

    /// How many decimals an amount has: EUR 2, JPY 0, KWD 3, CLF 4.
    #[must_use]
    pub fn decimals(self) -> u32 {
        self.0.exponent().map_or(0, u32::from)
    }
}

impl fmt::Display for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

impl fmt::Debug for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

impl Money {
    /// An amount from its smallest unit: 1000 is 10.00 EUR, 1000 JPY, 1.000 KWD.
    #[must_use]
    pub const fn from_minor_units(minor_units: i64, currency: Currency) -> Self {
        Self { minor_units, currency }
    }

    /// Reads a decimal in the grammar of a JSON number; `10`, `10.0`, `10.000` and `1e1` are the same amount of any currency, `-0`
    /// is zero. Negative amounts are read as such: whether one makes sense is the caller's rule.
    ///
    /// # Errors
    /// The text is no number, needs more decimals than the currency has, or is too large. Nothing is rounded.
    pub fn from_decimal(text: &str, currency: Currency) -> Result<Self, AmountFault> {
        let minor_units = scaled_integer(text, currency.decimals())?;
        Ok(Self { minor_units, currency })
    }

    /// The amount in the currency's smallest unit.
    #[must_use]
    pub const fn minor_units(self) -> i64 {
        self.minor_units
    }

    /// The currency.
    #[must_use]
    pub const fn currency(self) -> Currency {
        self.currency
    }

    /// The amount with exactly the currency's decimals and without its code: `10.00`, `500`, `1.234`.
    #[must_use]
    pub fn decimal(self) -> String {
        self.to_string()
    }
}

/// The same text as [`Money::decimal`].
impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.currency.decimal_of(self.minor_units.into()))
    }
}

/// The number in `text`, times ten to the power of `decimals`, if that is a whole number of 64 bits: exact, in one pass, without an
/// allocation. `text` must follow the grammar of a JSON number.
pub(super) fn scaled_integer(text: &str, decimals: u32) -> Result<i64, AmountFault> {
    if let Some(value) = few_digits(text.as_bytes()) {
        return shift(value, i64::from(decimals)).and_then(|value| i64::try_from(value).ok()).ok_or(AmountFault::TooLarge);
    }
    let (negative, unsigned) = match text.as_bytes() {
        [b'-', unsigned @ ..] => (true, unsigned),
        unsigned => (false, unsigned),
    };
    let mantissa = Mantissa::read(unsigned)?;
    let exponent = match mantissa.rest {
        [] => 0,
        [_, exponent @ ..] => parse_exponent(exponent)?,
    };
    if mantissa.is_zero {
        return Ok(0);
    }
    let places = exponent.saturating_add(mantissa.trailing_zeros).saturating_add(i64::from(decimals)) - mantissa.decimals;
    if places < 0 {
        return Err(AmountFault::TooManyDecimals);
    }
    let magnitude = mantissa.significant.and_then(|digits| shift(digits, places)).ok_or(AmountFault::TooLarge)?;
    let value = if negative { 0_i64.checked_sub_unsigned(magnitude) } else { 0_i64.checked_add_unsigned(magnitude) };
    value.ok_or(AmountFault::TooLarge)
}

/// What nearly all ids are: digits and nothing else, so few that their value fits.
fn few_digits(text: &[u8]) -> Option<u64> {
    let fits = matches!(text, [b'1'..=b'9', ..]) && text.len() <= 19;
    if !fits {
        return None;
    }
    text.iter().try_fold(0_u64, |value, byte| byte.is_ascii_digit().then(|| value * 10 + u64::from(byte - b'0')))
}

/// The digits before an exponent.
struct Mantissa<'a> {
    /// They as a number, without the zeros at either end; `None` when that does not fit, while its scale is still worth knowing.
    significant: Option<u64>,
    trailing_zeros: i64,
    /// How many stood after the point.
    decimals: i64,
    is_zero: bool,
    /// The exponent with its letter, or nothing.
    rest: &'a [u8],
}

impl<'a> Mantissa<'a> {
    fn read(text: &'a [u8]) -> Result<Self, AmountFault> {
        let (mut significant, mut trailing_zeros, mut is_zero) = (Some(0_u64), 0, true);
        let (mut point, mut end) = (None, text.len());
        for (at, byte) in text.iter().enumerate() {
            match byte {
                b'0' => trailing_zeros += 1,
                b'1'..=b'9' => {
                    let digit = u64::from(byte - b'0');
                    significant = significant.and_then(|value| shift(value, trailing_zeros + 1)?.checked_add(digit));
                    (trailing_zeros, is_zero) = (0, false);
                }
                b'.' if point.is_none() => point = Some(at),
                b'e' | b'E' => {
                    end = at;
                    break;
                }
                _ => return Err(AmountFault::NotANumber),
            }
        }
        let (digits, rest) = text.split_at(end);
        let (whole, fraction) = match point {
            Some(at) => (&digits[..at], &digits[at + 1..]),
            None => (digits, &digits[end..]),
        };
        let well_formed = matches!(whole, [b'0'] | [b'1'..=b'9', ..]) && (point.is_none() || !fraction.is_empty());
        // A slice is never longer than i64::MAX.
        let decimals = fraction.len() as i64;
        if well_formed { Ok(Self { significant, trailing_zeros, decimals, is_zero, rest }) } else { Err(AmountFault::NotANumber) }
    }
}

/// `value × 10^places`, where it fits. Zero is the same at any scale.
fn shift(value: u64, places: i64) -> Option<u64> {
    const POWERS: [u64; 20] = {
        let (mut powers, mut at) = ([1; 20], 1);
        while at < powers.len() {
            powers[at] = powers[at - 1] * 10;
            at += 1;
        }
        powers
    };
    match usize::try_from(places).ok().and_then(|places| POWERS.get(places)) {
        Some(power) => value.checked_mul(*power),
        None => (value == 0).then_some(0),
    }
}

/// The digits after `e`. An exponent beyond 64 bits is as far out of range as the largest that fits.
fn parse_exponent(text: &[u8]) -> Result<i64, AmountFault> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(AmountFault::NotANumber);
    }
    // Bounded so that adding lengths to it cannot overflow.
    let value = digits.iter().fold(0_i64, |value, digit| (value * 10 + i64::from(digit - b'0')).min(i64::MAX / 16));
    Ok(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn currency(code: &str) -> Currency {
        Currency::from_code(code).unwrap()
    }

    fn minor(text: &str, code: &str) -> Result<i64, AmountFault> {
        Money::from_decimal(text, currency(code)).map(Money::minor_units)
    }

    fn every_currency() -> Vec<Currency> {
        let listed = (0..1000).filter_map(iso_currency::Currency::from_numeric);
        listed.filter_map(|listed| Currency::from_code(listed.code()).ok()).collect()
    }

    // CASES F10
    #[test]
    fn prices_that_floats_get_wrong_are_exact() {
        let prices = [("19.99", 1999), ("8.29", 829), ("17.08", 1708), ("263.90", 26390), ("4.35", 435), ("0.1", 10), ("0.2", 20)];
        for (text, cents) in prices {
            assert_eq!(minor(text, "EUR"), Ok(cents), "{text}");
        }
        assert_eq!(minor("0.1", "EUR").unwrap() + minor("0.2", "EUR").unwrap(), minor("0.3", "EUR").unwrap());
    }

    // CASES F10
    #[test]
    fn every_amount_up_to_a_hundred_is_exact() {
        for cents in 1..=10_000_i64 {
            let (whole, rest) = (cents / 100, cents % 100);
            for text in [
                format!("{whole}.{rest:02}"),
                format!("{whole}.{rest:02}000"),
                format!("{cents}e-2"),
                format!("{whole}{rest:02}.0E-02"),
            ] {
                let text =
                    if text.starts_with('0') && !text.starts_with("0.") { text.trim_start_matches('0').to_owned() } else { text };
                assert_eq!(minor(&text, "EUR"), Ok(cents), "{text}");
            }
            assert_eq!(Money::from_minor_units(cents, currency("EUR")).decimal(), format!("{whole}.{rest:02}"));
        }
    }

    // CASES F12
    #[test]
    fn each_currency_has_its_own_decimals() {
        assert_eq!(minor("500", "JPY"), Ok(500));
        assert_eq!(minor("5.00", "EUR"), Ok(500));
        assert_eq!(minor("1.234", "KWD"), Ok(1234));
        assert_eq!(minor("500.00", "JPY"), Ok(500));
        assert_eq!(minor("10.5", "JPY"), Err(AmountFault::TooManyDecimals));
        assert_eq!(minor("10.005", "EUR"), Err(AmountFault::TooManyDecimals));
        let exceptions: [(u32, &str); 3] = [
            (0, "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"),
            (3, "BHD IQD JOD KWD LYD OMR TND"),
            (4, "CLF UYW"),
        ];
        let expected = |code: &str| exceptions.iter().find(|(_, codes)| codes.contains(code)).map_or(2, |(decimals, _)| *decimals);
        for currency in every_currency() {
            assert_eq!(currency.decimals(), expected(currency.code()), "{currency}");
        }
        assert!(every_currency().len() > 150);
    }

    // CASES F12
    #[test]
    fn codes_in_which_nobody_can_pay_are_refused() {
        for code in ["XXX", "XTS", "XAU", "XAG", "XPD", "XPT", "XDR", "XUA", "XBA", "XAD"] {
            assert_eq!(Currency::from_code(code), Err(CurrencyFault::NotPayable), "{code}");
        }
        for code in ["ZZZ", "eur", "EURO", "EU", "", "E\0R", "ЕUR", "978"] {
            assert_eq!(Currency::from_code(code), Err(CurrencyFault::Unknown), "{code}");
        }
    }

    // CASES F11
    #[test]
    fn numbers_that_parsers_bend_have_a_defined_result() {
        let exact = [
            ("9007199254740993", 900_719_925_474_099_300),
            ("1e2", 10_000),
            ("1E-2", 1),
            ("1e+0", 100),
            ("0.10", 10),
            ("-0", 0),
            ("-0.0", 0),
            ("0e999999999999999999999", 0),
            ("0.0000000000000000000000000000000000000000000000000000000000000000", 0),
            ("100000000000000000000000000000e-28", 1000),
            ("-5", -500),
            ("92233720368547758.07", i64::MAX),
            ("-92233720368547758.08", i64::MIN),
        ];
        for (text, expected) in exact {
            assert_eq!(minor(text, "EUR"), Ok(expected), "{text}");
        }
        let faults = [
            ("1e400", AmountFault::TooLarge),
            ("1E99999999999999999999", AmountFault::TooLarge),
            ("18446744073709551616", AmountFault::TooLarge),
            ("92233720368547758.08", AmountFault::TooLarge),
            ("5.06e-6", AmountFault::TooManyDecimals),
            ("1e-99999999999999999999", AmountFault::TooManyDecimals),
            ("0.1234567890123456789012345678901", AmountFault::TooManyDecimals),
        ];
        for (text, fault) in faults {
            assert_eq!(minor(text, "EUR"), Err(fault), "{text}");
        }
        for text in [
            "", "-", "+1", ".5", "5.", "01", "00", "1e", "1e+", "1e1.0", "0x10", "NaN", "Infinity", "1,00", " 1", "1 ", "--1", "١",
            "1_0",
        ] {
            assert_eq!(minor(text, "EUR"), Err(AmountFault::NotANumber), "{text:?}");
        }
    }

    #[test]
    fn a_number_of_a_million_digits_is_read_in_one_pass() {
        assert_eq!(minor(&"9".repeat(1_000_000), "EUR"), Err(AmountFault::TooLarge));
        assert_eq!(minor(&format!("0.{}1", "0".repeat(1_000_000)), "EUR"), Err(AmountFault::TooManyDecimals));
        assert_eq!(minor(&format!("7.{}", "0".repeat(1_000_000)), "EUR"), Ok(700));
        assert_eq!(minor(&format!("1e{}", "9".repeat(1_000_000)), "EUR"), Err(AmountFault::TooLarge));
    }

    #[test]
    fn text_has_exactly_the_currency_s_decimals() {
        let texts = [
            (1000, "EUR", "10.00"),
            (500, "JPY", "500"),
            (1234, "KWD", "1.234"),
            (5, "EUR", "0.05"),
            (-5, "EUR", "-0.05"),
            (1, "CLF", "0.0001"),
        ];
        for (units, code, text) in texts {
            assert_eq!(Money::from_minor_units(units, currency(code)).decimal(), text);
        }
    }

    proptest! {
        #[test]
        fn amounts_round_trip(units in any::<i64>(), index in any::<prop::sample::Index>()) {
            let money = Money::from_minor_units(units, *index.get(&every_currency()));
            prop_assert_eq!(Money::from_decimal(&money.decimal(), money.currency()), Ok(money));
        }

        #[test]
        fn reading_any_text_ends_without_a_panic(text in "[-+0-9.eE]{0,40}|\\PC*") {
            let _ = scaled_integer(&text, 2);
        }
    }
}
