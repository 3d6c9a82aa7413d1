//! An amount as PostgreSQL's `numeric`, digit for digit.
//!
//! In: a [`Money`]. Out: its bytes on the wire. It owns nothing.
//!
//! Invariant: the number that arrives is the amount, with as many decimals as its currency has.

use std::io::Write as _;

use diesel::pg::Pg;
use diesel::serialize::{IsNull, Output, ToSql};
use diesel::sql_types::Numeric;

use crate::event::Money;

/// A digit on the wire is one of ten thousand, so that four decimals are one digit.
const BASE: u128 = 10_000;
/// Decimals of one digit.
const DIGIT: u32 = 4;
const NEGATIVE: u16 = 0x4000;

/// An amount to be written.
#[derive(Clone, Copy, Debug, diesel::expression::AsExpression)]
#[diesel(sql_type = Numeric)]
pub struct Exact(pub Money);

impl Exact {
    /// As `numeric_send` writes it: how many digits, the weight of the first, the sign, the decimals, the digits.
    pub fn encode(self, mut put: impl FnMut(u16)) {
        let (units, decimals) = (self.0.minor_units(), self.0.currency().decimals());
        // No currency of ISO 4217 has more than four.
        let scaled = u128::from(units.unsigned_abs()) * 10_u128.pow(DIGIT.saturating_sub(decimals));
        // 2^63 with four more decimals has six digits before the point at most.
        let mut digits = [0_u16; 7];
        let mut rest = scaled;
        for digit in digits.iter_mut().rev() {
            *digit = (rest % BASE) as u16;
            rest /= BASE;
        }
        // The last one stands behind the point.
        let first = digits.iter().position(|digit| *digit != 0).unwrap_or(digits.len());
        let end = digits.iter().rposition(|digit| *digit != 0).map_or(first, |last| last + 1);
        let weight = if first == end { 0 } else { digits.len() as i16 - 2 - first as i16 };
        put((end - first) as u16);
        put(weight.cast_unsigned());
        put(if units < 0 { NEGATIVE } else { 0 });
        put(decimals as u16);
        digits[first..end].iter().copied().for_each(put);
    }
}

impl ToSql<Numeric, Pg> for Exact {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> diesel::serialize::Result {
        let (mut bytes, mut length) = ([0; 2 * (4 + 7)], 0);
        self.encode(|word| {
            bytes[length..length + 2].copy_from_slice(&word.to_be_bytes());
            length += 2;
        });
        out.write_all(&bytes[..length])?;
        Ok(IsNull::No)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::event::Currency;

    fn words(units: i64, code: &str) -> Vec<u16> {
        let mut words = Vec::new();
        Exact(Money::from_minor_units(units, Currency::from_code(code).unwrap())).encode(|word| words.push(word));
        words
    }

    /// What the words say, in ten-thousandths, by the definition of the wire format and not by the way back.
    fn ten_thousandths(words: &[u16]) -> (i128, u16) {
        let [count, weight, sign, decimals, digits @ ..] = words else { panic!("four words come first") };
        assert_eq!(*count as usize, digits.len());
        let weight = i32::from(weight.cast_signed());
        let worth = digits.iter().enumerate().map(|(place, digit)| {
            let power =
                u32::try_from(weight - i32::try_from(place).unwrap() + 1).expect("nothing is smaller than a ten-thousandth");
            assert!(*digit < 10_000);
            i128::from(*digit) * 10_000_i128.pow(power)
        });
        let worth: i128 = worth.sum();
        (if *sign == NEGATIVE { -worth } else { worth }, *decimals)
    }

    #[test]
    fn known_amounts_are_written_as_the_server_writes_them() {
        // SELECT encode(numeric_send(…), 'hex')
        assert_eq!(words(1_000, "EUR"), [1, 0, 0, 2, 10]);
        assert_eq!(words(50, "EUR"), [1, 0_u16.wrapping_sub(1), 0, 2, 5_000]);
        assert_eq!(words(1_234_567, "EUR"), [3, 1, 0, 2, 1, 2_345, 6_700]);
        assert_eq!(words(500, "JPY"), [1, 0, 0, 0, 500]);
        assert_eq!(words(10_000, "JPY"), [1, 1, 0, 0, 1]);
        assert_eq!(words(0, "EUR"), [0, 0, 0, 2]);
        assert_eq!(words(-1_234, "KWD"), [2, 0, NEGATIVE, 3, 1, 2_340]);
    }

    proptest! {
        #[test]
        fn every_amount_says_what_it_is(units: i64, code in prop::sample::select(vec!["EUR", "JPY", "KWD", "CLF"])) {
            let decimals = Currency::from_code(code).unwrap().decimals();
            let exact = i128::from(units) * 10_i128.pow(4 - decimals);
            prop_assert_eq!(ten_thousandths(&words(units, code)), (exact, decimals as u16));
        }
    }
}
