// A model's text as elements. Whatever it says becomes text nodes: nothing in it is ever parsed as HTML.

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.append(text);
  return element;
}

// The little Markdown that chat models write: fenced code, headings, lists, paragraphs; **bold** and `code` inside.
export function renderMarkdown(text) {
  const out = document.createDocumentFragment();
  let paragraph = [], list = null, code = null;
  const endParagraph = () => {
    if (paragraph.length) out.append(withInline(make("p"), paragraph.join("\n")));
    paragraph = [];
  };
  for (const line of text.split("\n")) {
    if (code) {
      if (/^\s*```\s*$/.test(line)) code = null;
      else code.append((code.hasChildNodes() ? "\n" : "") + line);
      continue;
    }
    const item = line.match(/^\s*(?:([-*•])|(\d{1,3})[.)])\s+(.*)$/), heading = line.match(/^#{1,6}\s+(.*)$/);
    if (!item) list = null;
    if (/^\s*```/.test(line)) {
      endParagraph();
      const block = make("pre");
      code = make("code");
      block.append(code);
      out.append(block);
    } else if (item) {
      endParagraph();
      const kind = item[1] ? "ul" : "ol";
      if (list?.localName !== kind) {
        list = make(kind);
        if (item[2]) list.start = Number(item[2]);
        out.append(list);
      }
      list.append(withInline(make("li"), item[3]));
    } else if (heading) {
      endParagraph();
      out.append(withInline(make("h3"), heading[1]));
    } else if (line.trim() === "") {
      endParagraph();
    } else {
      paragraph.push(line);
    }
  }
  endParagraph();
  return out;
}

function withInline(element, text) {
  for (const part of text.split(/(\*\*[^*\n]+\*\*|`[^`\n]+`)/)) {
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) element.append(make("strong", "", part.slice(2, -2)));
    else if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) element.append(make("code", "", part.slice(1, -1)));
    else if (part) element.append(part);
  }
  return element;
}
