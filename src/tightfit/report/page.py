"""The HTML of a picture, as a Jinja template with escaping on. Knows no bills.

No script, no font, no address: the page is whole without a network, in a mail and with scripts
off. Widths are percent of a bar's row, so it fits any window. Hovering or tabbing to a segment
shows what it is; the tables below say the same to those who cannot see bars.
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --over: #b00020; }
@media (prefers-color-scheme: dark) { :root { --over: #ff8a80; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.over { color: var(--over); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: 5.5rem 1fr 12rem; align-items: center; gap: .6rem; }
.track { position: relative; height: 1.9rem; margin: .15rem 0; background: #8882; }
.bar { display: flex; height: 100%; }
.segment { position: relative; box-sizing: border-box; border-right: 1px solid #fff; min-width: 0; }
.segment b { display: block; overflow: hidden; text-align: center; line-height: 1.9rem; }
.tip { display: none; position: absolute; z-index: 2; bottom: 105%; left: 0; padding: .3rem .6rem;
  background: #222; color: #fff; white-space: nowrap; border-radius: .3rem; }
.segment:hover .tip, .segment:focus .tip { display: block; }
.segment.late .tip { left: auto; right: 0; }
.limit { position: absolute; top: -.15rem; bottom: -.15rem; border-left: 3px solid var(--over); }
.beyond { position: absolute; top: 0; bottom: 0; pointer-events: none;
  background: repeating-linear-gradient(45deg, #b00020 0 2px, transparent 2px 9px); }
.total { font-variant-numeric: tabular-nums; }
.legend { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr));
  gap: .3rem 1.2rem; padding: 0; list-style: none; }
.legend b { display: inline-block; width: 1.5em; text-align: center; }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto; gap: 0; }
  .track { grid-column: 1 / -1; order: 1; margin-bottom: .6rem; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884;
  white-space: nowrap; }
th:first-child { text-align: left; }
footer { margin-top: 2.5rem; opacity: .75; font-size: .9rem; }
@media print { .segment, .beyond, .legend b { print-color-adjust: exact; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, value in facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% for chart in charts %}<section>
<h2{% if chart.over %} class="over"{% endif %}>{{ chart.heading }}</h2>
{% for bar in chart.bars %}<div class="row">
<span>{{ bar.phase }}</span>
<div class="track">
<div class="bar" style="width:{{ bar.width }}%">
{% for segment in bar.segments %}<div class="segment{{ ' late' if segment.late }}" tabindex="0"\
 style="flex:{{ segment.bytes }} 1 0;background:{{ segment.look.colour }};\
color:{{ segment.look.ink }}">\
<b>{{ segment.letter }}</b><span class="tip">{{ segment.said }}</span></div>
{% endfor %}</div>
{% if bar.beyond %}<div class="beyond"\
 style="left:{{ chart.limit }}%;width:{{ bar.beyond }}%"></div>
{% endif %}{% if chart.limit is not none %}<div class="limit" style="left:{{ chart.limit }}%"></div>
{% endif %}</div>
<span class="total">{{ bar.total }}\
{% if bar.over %} <span class="over">+{{ bar.over }}</span>{% endif %}</span>
</div>
{% endfor %}</section>
{% endfor %}<ul class="legend">
{% for look, kind in legend %}<li><b style="background:{{ look.colour }};color:{{ look.ink }}">\
{{ look.letter }}</b> {{ kind }}: {{ look.meaning }}</li>
{% endfor %}</ul>
{% for table in tables %}<div class="scroll"><table>
<caption>{{ table.caption }}</caption>
<thead><tr><th scope="col">kind</th>\
{% for phase in table.phases %}<th scope="col">{{ phase }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr><th scope="row">{{ row.kind }}</th>\
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
<tfoot><tr><th scope="row">total</th>\
{% for cell in table.totals %}<td>{{ cell }}</td>{% endfor %}</tr></tfoot>
</table></div>
{% endfor %}<footer>{{ footer }}</footer>
</body>
</html>
"""
