//! (a stand-in until the event's room is merged)
#![expect(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Currency([u8; 3]);
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Money(i64, Currency);
impl Currency {
    pub fn from_code(code: &str) -> Result<Self, String> {
        Ok(Self(code.as_bytes().try_into().map_err(|_| "no currency")?))
    }
    pub fn code(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}
impl Money {
    pub fn from_decimal(text: &str, currency: Currency) -> Result<Self, String> {
        Ok(Self(text.replace('.', "").parse().map_err(|_| "no amount")?, currency))
    }
    pub fn currency(self) -> Currency {
        self.1
    }
    pub fn decimal(self) -> String {
        format!("{}.{:02}", self.0 / 100, self.0 % 100)
    }
}
