//! Debian's chromium, driven as a person would: it looks, clicks and types. WebDriver is JSON over HTTP, and no more of it is needed.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use onceward::lab::process::{self, Signal, TempFolder};
use serde_json::{Value, json};

use super::engine::request;
use super::{LIMIT, eventually, eventually_equal};

/// A browser with one tab, ended when it is dropped.
pub struct Browser {
    driver: Child,
    address: String,
    session: String,
    // Dropped last: the browser writes into it.
    _folder: TempFolder,
}

impl Browser {
    /// Opens this page.
    pub fn open(url: &str) -> Self {
        let port = process::free_port().expect("a free port");
        let mut command = Command::new("chromedriver");
        command.arg(format!("--port={port}")).stdout(Stdio::null()).stderr(Stdio::null());
        let driver = process::spawn(command, Signal::Kill).expect("chromedriver is there (Debian: chromium-driver)");
        let folder = TempFolder::new("browser").expect("a folder");
        let mut browser = Self { driver, address: format!("127.0.0.1:{port}"), session: String::new(), _folder: folder };
        // By a pipe, the browser ends with its driver. Who runs as root in a container has no sandbox to give.
        let arguments = [
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--hide-scrollbars".to_owned(),
            "--remote-debugging-pipe".to_owned(),
            "--window-size=1280,1000".to_owned(),
            format!("--user-data-dir={}", browser._folder.path().display()),
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": { "args": arguments } } } });
        let session = eventually("the browser starts", || browser.ask("POST", "/session", &wanted).ok());
        browser.session = format!("/session/{}", session["sessionId"].as_str().expect("a session"));
        browser.go(url);
        browser
    }

    /// Goes to a page.
    pub fn go(&self, url: &str) {
        self.must("POST", "/url", &json!({ "url": url }));
    }

    /// Clicks on what the selector finds, once it can be clicked on.
    pub fn click(&self, selector: &str) {
        eventually(&format!("{selector} is clicked on"), || {
            let element = self.find(selector)?;
            self.within("POST", &format!("/element/{element}/click"), &json!({})).ok()
        });
    }

    /// Clicks on what opens a dialog until that is open. A row is made anew every second, and a click on one that is going is nobody's.
    pub fn opens(&self, selector: &str) {
        self.misses("dialog[open]");
        eventually(&format!("{selector} opens a dialog"), || {
            if let Some(element) = self.find(selector) {
                // Behind a dialog nothing can be clicked on.
                let _ = self.within("POST", &format!("/element/{element}/click"), &json!({}));
            }
            self.find("dialog[open]")
        });
    }

    /// Types into what the selector finds, in place of what stands there.
    pub fn fill(&self, selector: &str, text: &str) {
        eventually(&format!("{selector} is filled"), || {
            let element = self.find(selector)?;
            self.within("POST", &format!("/element/{element}/clear"), &json!({})).ok()?;
            self.within("POST", &format!("/element/{element}/value"), &json!({ "text": text })).ok()
        });
    }

    /// What a person reads there; nothing of what is hidden. `None` while it is not there.
    pub fn text(&self, selector: &str) -> Option<String> {
        let element = self.find(selector)?;
        let text = self.within("GET", &format!("/element/{element}/text"), &Value::Null).ok()?;
        Some(text.as_str()?.to_owned())
    }

    /// Waits until a person reads these words there.
    pub fn sees(&self, selector: &str, words: &str) {
        let mut last = None;
        eventually_equal(&format!("{selector} says {words:?}"), (true, String::new()), || {
            last = self.text(selector);
            let seen = last.as_ref().is_some_and(|text| text.contains(words));
            (seen, if seen { String::new() } else { last.clone().unwrap_or_else(|| "(not there)".to_owned()) })
        });
    }

    /// Waits until nothing is found any more.
    pub fn misses(&self, selector: &str) {
        // The driver says so; what it could not look for may be there.
        eventually(&format!("no {selector}"), || self.look_for(selector).is_err_and(|why| why.contains("no such element")));
    }

    /// What a script on the page returns.
    pub fn run(&self, script: &str) -> Value {
        self.must("POST", "/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// A command of Chrome's own protocol.
    pub fn chrome(&self, command: &str, parameters: Value) -> Value {
        self.must("POST", "/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    fn find(&self, selector: &str) -> Option<String> {
        self.look_for(selector).ok()
    }

    fn look_for(&self, selector: &str) -> Result<String, String> {
        let found = self.within("POST", "/element", &json!({ "using": "css selector", "value": selector }))?;
        // The name that the protocol gives to elements.
        Ok(found["element-6066-11e4-a52e-4f735466cecf"].as_str().ok_or("no name")?.to_owned())
    }

    fn must(&self, method: &str, path: &str, body: &Value) -> Value {
        self.within(method, path, body).unwrap_or_else(|why| panic!("{method} {path}: {why}"))
    }

    fn within(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        self.ask(method, &format!("{}{path}", self.session), body)
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) =
            request(LIMIT, &self.address, method, path, &[("Content-Type", "application/json")], &body).ok_or("no answer")?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| error.to_string())?;
        if status == 200 { Ok(answer["value"].clone()) } else { Err(answer["value"]["message"].to_string()) }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if thread::panicking() {
            let text = self.text("body").unwrap_or_default();
            eprintln!("--- the page ---\n{text}\n---");
        }
        let _ = self.within("DELETE", "", &Value::Null); // gone or never to go
        let _ = process::end(&mut self.driver, Signal::Term, Duration::from_secs(5));
    }
}
