//! The status page: one file, which asks the API for everything.
//!
//! Invariant: the browser runs and styles by nothing but what stands in that file, and makes no element out of text.

use std::sync::LazyLock;

use actix_web::HttpResponse;
use actix_web::http::header::{self, ContentType};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page.html");

static POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(hash_of);
    format!(
        "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
});

pub async fn page() -> HttpResponse {
    HttpResponse::Ok()
        .content_type(ContentType::html())
        .insert_header((header::CONTENT_SECURITY_POLICY, POLICY.as_str()))
        .body(PAGE)
}

/// Of what stands between the tags, as a policy names it.
fn hash_of(tag: &str) -> String {
    let (_, inside) = PAGE.split_once(&format!("<{tag}>")).expect("the page has one");
    let (inside, _) = inside.split_once(&format!("</{tag}>")).expect("that ends");
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(inside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_one_script_and_one_style_and_fetches_nothing_from_elsewhere() {
        for tag in ["<script>", "<style>", "<link"] {
            assert_eq!(PAGE.matches(tag).count(), 1, "{tag}");
        }
        for banned in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "src=\"http", "@import"]
        {
            assert!(!PAGE.contains(banned), "{banned}");
        }
        let (markup, _) = PAGE.split_once("<script>").expect("a script");
        let handlers: Vec<&str> = markup.split_whitespace().filter(|word| word.starts_with("on") && word.contains('=')).collect();
        assert_eq!(handlers, [""; 0], "no handler in the markup");
        assert!(POLICY.contains("script-src 'sha256-") && !POLICY.contains("unsafe"), "{}", *POLICY);
    }
}
