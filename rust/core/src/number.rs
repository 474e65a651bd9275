//! JSON numbers and their conversion to doubles, correctly rounded.

use crate::span::Span;

/// A JSON number, parsed but not converted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Number {
    pub span: Span,
    pub is_integer: bool,
    pub is_negative: bool,
    /// The digits without the point. Valid only for at most 19 digits.
    pub mantissa: u64,
    pub digits: u32,
    pub exponent: i32,
}

impl Number {
    /// The value, if it is an integer literal in `0..=max`.
    pub(crate) fn as_integer(&self, max: u64) -> Option<u64> {
        let value = if self.digits <= 19 { self.mantissa } else { return None };
        (self.is_integer && value <= max && (!self.is_negative || value == 0)).then_some(value)
    }

    /// The value, if it is an integer literal that fits.
    pub(crate) fn as_i64(&self, data: &[u8]) -> Option<i64> {
        std::str::from_utf8(self.span.of(data)).ok()?.parse().ok()
    }

    /// The nearest double, as Python's `json` and `float` give it. Infinite beyond the range of doubles.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a fifth of the time of an incremental stream, measured")]
    pub(crate) fn as_f64(&self, data: &[u8]) -> f64 {
        let magnitude = self.magnitude(data);
        // An integer literal has no negative zero in Python.
        if self.is_negative && !(self.is_integer && self.digits == 0) { -magnitude } else { magnitude }
    }

    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a fifth of the time of an incremental stream, measured")]
    fn magnitude(&self, data: &[u8]) -> f64 {
        if self.digits == 0 {
            return 0.0;
        }
        let places = self.exponent.unsigned_abs() as usize;
        if self.digits <= 19 && self.exponent <= 0 {
            // Up to 2^53 and 10^22 both are exact doubles, so one division rounds once (Clinger 1990).
            if self.mantissa <= 1 << 53 && places < POWERS_OF_TEN.len() {
                #[allow(clippy::cast_precision_loss, reason = "exact up to 2^53")]
                return self.mantissa as f64 / POWERS_OF_TEN[places];
            }
            if places < POWERS_OF_FIVE.len() {
                return quotient(self.mantissa, places);
            }
        }
        self.parsed(data)
    }

    /// The magnitude, parsed by std: for digits that exceed 64 bits, and for exponents.
    #[cold]
    fn parsed(&self, data: &[u8]) -> f64 {
        let text = std::str::from_utf8(self.span.of(data)).unwrap_or_default();
        text.trim_start_matches('-').parse().unwrap_or(f64::NAN)
    }
}

const POWERS_OF_TEN: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

pub(crate) const WHOLE_POWERS_OF_TEN: [u64; 9] =
    [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

const POWERS_OF_FIVE: [u64; 28] = {
    let mut powers = [1; 28];
    let mut index = 1;
    while index < powers.len() {
        powers[index] = powers[index - 1] * 5;
        index += 1;
    }
    powers
};

/// The number of leading digits in eight characters, read as little endian, and their value.
#[inline]
pub(crate) fn leading_digits(word: u64) -> (u32, u64) {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let values = word ^ ZEROS;
    // The high half of a byte is set exactly if the byte is not a digit.
    let others = (values | values.wrapping_add(0x0606_0606_0606_0606)) & 0xF0F0_F0F0_F0F0_F0F0;
    let count = others.trailing_zeros() / 8;
    // Move the digits to the end, with leading zeros. Then join pairs, fours and all eight, with one product each.
    let word = if count == 0 { 0 } else { values << (64 - 8 * count) };
    let word = (word.wrapping_mul(10) + (word >> 8)) & 0x00FF_00FF_00FF_00FF;
    let word = (word.wrapping_mul(100) + (word >> 16)) & 0x0000_FFFF_0000_FFFF;
    (count, (word.wrapping_mul(10_000) + (word >> 32)) & 0xFFFF_FFFF)
}

/// `mantissa` / 10^`places`, rounded once; `mantissa` is not 0.
#[inline]
fn quotient(mantissa: u64, places: usize) -> f64 {
    // 10^places = 5^places * 2^places, and the power of two only moves the exponent. Both sides fill 64 bits, so the
    // quotient has at least 62 bits. With the remainder in its last bit, the conversion rounds correctly.
    let divisor = POWERS_OF_FIVE[places];
    let (up, down) = (mantissa.leading_zeros(), divisor.leading_zeros());
    let dividend = u128::from(mantissa << up) << 63;
    let divisor = u128::from(divisor << down);
    #[allow(clippy::cast_possible_truncation, reason = "the divisor fills 64 bits, the dividend 127")]
    let quotient = (dividend / divisor) as u64 | u64::from(!dividend.is_multiple_of(divisor));
    #[allow(clippy::cast_precision_loss, reason = "this is the rounding")]
    let significand = quotient as f64;
    // 2^(down - up - 63 - places) is a normal double, and so is the result.
    let exponent = 1023 + u64::from(down) - 63 - u64::from(up) - places as u64;
    significand * f64::from_bits(exponent << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_digits_are_counted_and_read() {
        for (text, expected) in [
            ("12345678", (8, 12_345_678)),
            ("00000000", (8, 0)),
            ("1234567.", (7, 1_234_567)),
            ("90,12345", (2, 90)),
            ("-1234567", (0, 0)),
            (":2345678", (0, 0)),
            ("/2345678", (0, 0)),
            ("1\u{e9}34567", (1, 1)),
        ] {
            assert_eq!(leading_digits(u64::from_le_bytes(text.as_bytes().try_into().unwrap())), expected, "{text}");
        }
    }

    #[test]
    fn a_quotient_is_rounded_once() {
        for (mantissa, places) in
            [(1, 1), (3, 27), (u64::MAX, 0), (u64::MAX, 27), (9_007_199_254_740_993, 0), (12_345_678_806_304_931, 17)]
        {
            let expected: f64 = format!("{mantissa}e-{places}").parse().unwrap();
            assert_eq!(quotient(mantissa, places).to_bits(), expected.to_bits(), "{mantissa}e-{places}");
        }
    }
}
