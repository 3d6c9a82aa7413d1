//! Rendering.
/// x
pub fn example() -> String {
    todo!()
}
/// x
pub fn markdown() -> String {
    todo!()
}
