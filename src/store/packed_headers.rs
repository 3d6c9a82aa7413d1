//! All headers of a record in one value.
//!
//! Invariant: they come back exactly as they went in, whatever bytes they are made of; what is stored can be read for ever.

use crate::record::Header;

/// The length of a value that is null.
const NULL: u32 = u32::MAX;

/// All headers in one value, each part behind its length (big-endian, four bytes), so that no byte is special. Frozen: it is stored.
#[must_use]
pub fn pack(headers: &[Header]) -> Vec<u8> {
    // A record is far below 4 GiB, so every length fits.
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("a header of less than 4 GiB").to_be_bytes();
    let mut packed = u32::try_from(headers.len()).expect("less than 4 G headers").to_be_bytes().to_vec();
    for (name, value) in headers {
        packed.extend_from_slice(&length(name));
        packed.extend_from_slice(name);
        packed.extend_from_slice(&value.as_deref().map_or(NULL.to_be_bytes(), length));
        packed.extend_from_slice(value.as_deref().unwrap_or_default());
    }
    packed
}

/// `None`: it is not what [`pack`] makes.
#[must_use]
pub fn unpack(mut packed: &[u8]) -> Option<Box<[Header]>> {
    fn number(packed: &mut &[u8]) -> Option<u32> {
        let (number, rest) = packed.split_first_chunk()?;
        *packed = rest;
        Some(u32::from_be_bytes(*number))
    }
    fn bytes(packed: &mut &[u8], length: u32) -> Option<Box<[u8]>> {
        let (bytes, rest) = packed.split_at_checked(length as usize)?;
        *packed = rest;
        Some(bytes.into())
    }
    let mut headers = Vec::new();
    for _ in 0..number(&mut packed)? {
        let length = number(&mut packed)?;
        let name = bytes(&mut packed, length)?;
        let value = match number(&mut packed)? {
            NULL => None,
            length => Some(bytes(&mut packed, length)?),
        };
        headers.push((name, value));
    }
    packed.is_empty().then(|| headers.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_went_in_and_broken_ones_are_refused() {
        let headers: Box<[Header]> = Box::new([
            (b"plain"[..].into(), Some(b"text"[..].into())),
            (b"plain"[..].into(), None),
            (Box::default(), Some(Box::default())),
            (b"\xff\xfe\0"[..].into(), Some(b"\0\xff"[..].into())),
        ]);
        let packed = pack(&headers);
        assert_eq!(unpack(&packed).as_deref(), Some(&*headers));
        assert_eq!(packed[..13], *b"\0\0\0\x04\0\0\0\x05plain", "stored, so frozen");
        for cut in 0..packed.len() {
            assert_eq!(unpack(&packed[..cut]), None, "{cut}");
        }
        assert_eq!(unpack(&[packed, vec![0]].concat()), None);
    }
}
